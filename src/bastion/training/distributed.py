"""The processes that train together: started by `torchrun`, or this one alone."""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from bastion.errors import BastionError
from bastion.models import Classifier
from bastion.training.sync_batchnorm import SyncBatchNorm2d

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """Which of how many processes this is. Its methods are called by all of them at the same point, or by none."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    @property
    def main(self) -> bool:
        """The one that writes and speaks."""
        return self.rank == 0

    def share(self, batch: int) -> int:
        """How many images of a batch of all processes are this one's."""
        if batch % self.size:
            what = f"{batch} cannot be shared out evenly to {self.size} processes"
            raise BastionError(f"batch: {what}; make it a multiple")
        return batch // self.size

    def wrap(self, module: nn.Module) -> nn.Module:
        """A module whose backward pass leaves the mean gradient of all processes."""
        if self.size == 1:
            return module
        # Gradients of 1×1 convolutions come in another layout on some machines, which costs next to nothing.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        # Buffers are made the same by `average_buffers`: after the step, so that the next attack sees them too.
        return DistributedDataParallel(module, forward_sync_buffers=False)

    def shard(self, model: Classifier) -> None:
        """Each process keeps its part of every block's weights, and gathers them when the block is used (FSDP2)."""
        for block in model.blocks():
            fully_shard(block.module)
        fully_shard(model)

    def sync_gradients(self, module: nn.Module, last: bool) -> AbstractContextManager[None]:
        """For the backward passes over the parts of a batch: gradients are exchanged in the last one only."""
        waits = isinstance(module, DistributedDataParallel) and not last
        return module.no_sync() if waits else nullcontext()  # type: ignore[operator]

    def sum(self, counts: list[int]) -> list[int]:
        if self.size == 1:
            return counts
        tensor = torch.tensor(counts, device=self.device)
        dist.all_reduce(tensor)
        summed: list[int] = tensor.tolist()
        return summed

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        if self.size == 1:
            return dict(values)
        tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return dict(zip(values, (tensor / self.size).tolist(), strict=True))

    def average_buffers(self, module: nn.Module) -> None:
        """Running statistics become the mean of everybody's: they are part of what the next attack sees."""
        if self.size == 1:
            return
        norms = (norm for norm in module.modules() if isinstance(norm, _NormBase))
        own = (norm for norm in norms if not isinstance(norm, SyncBatchNorm2d))  # the others agree already
        buffers = [buffer for norm in own for buffer in norm.buffers() if buffer.is_floating_point()]
        if not buffers:
            return
        joined = torch.cat([buffer.flatten() for buffer in buffers])
        dist.all_reduce(joined)
        parts = torch.split(joined / self.size, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))

    def on_main(self, work: Callable[[], T]) -> T:
        """What `work` returns in the main process, for everybody; an error that it raises is everybody's too."""
        result: list[T | BastionError | None] = [None]
        if self.main:
            try:
                result = [work()]
            except BastionError as error:
                result = [error]
        if self.size > 1:
            dist.broadcast_object_list(result, device=self.device)
        if isinstance(result[0], BastionError):
            raise result[0]
        return result[0]  # type: ignore[return-value]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def launcher() -> str | None:
    """Names the torchrun that started this process, and starts it again when one of the others has died."""
    return f"torchrun {os.getppid()}" if dist.is_torchelastic_launched() else None


@contextmanager
def join_processes(device: torch.device) -> Iterator[Processes]:
    """The processes of `torchrun`'s environment; without it, this one alone."""
    if not dist.is_torchelastic_launched() or int(os.environ["WORLD_SIZE"]) == 1:
        yield Processes(device=device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # Once and until the process ends: a second group would find the addresses of the first. So would a process that
        # torchrun started again, if the names it looks under were not of this start.
        store, rank, size = next(rendezvous("env://"))
        store = PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        atexit.register(dist.destroy_process_group)
    yield Processes(dist.get_rank(), dist.get_world_size(), device)
    dist.barrier()  # nobody leaves while another one still waits for an answer

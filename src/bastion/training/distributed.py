"""Distributed training: the processes started by `torchrun`, or a single one."""

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
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from bastion import torchrun
from bastion.errors import BastionError
from bastion.models import Classifier
from bastion.training.sync_batchnorm import SyncBatchNorm2d

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """Rank and number of the processes. Its methods must be called by all processes at the same point."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    @property
    def main(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def share(self, batch: int) -> int:
        """The number of images of a batch that each process gets."""
        if batch % self.size:
            what = f"{batch} cannot be shared out evenly to {self.size} processes"
            raise BastionError(f"batch: {what}; make it a multiple")
        return batch // self.size

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module with gradients averaged over all processes (DDP)."""
        if self.size == 1:
            return module
        # On some machines gradients of 1×1 convolutions have another memory layout, which costs almost nothing.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        # Buffers are synchronised by `average_buffers` after the step, so that the next attack sees them too.
        return DistributedDataParallel(module, forward_sync_buffers=False)

    def shard(self, model: Classifier) -> None:
        """Shard the weights: each process keeps a part, and gathers a block's weights when it runs (FSDP2)."""
        try:
            from torch.distributed.fsdp import fully_shard
        except ImportError as error:
            raise BastionError("sharding needs torch 2.6 or newer; update torch, or train unsharded") from error
        for block in model.blocks():
            fully_shard(block.module)
        fully_shard(model)

    def sync_gradients(self, module: nn.Module, last: bool) -> AbstractContextManager[None]:
        """With gradient accumulation, exchange gradients only in the last backward pass."""
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
        """Average the running statistics of norms over all processes, as the next attack uses them."""
        if self.size == 1:
            return
        norms = (norm for norm in module.modules() if isinstance(norm, _NormBase))
        own = (norm for norm in norms if not isinstance(norm, SyncBatchNorm2d))  # those are synchronised already
        buffers = [buffer for norm in own for buffer in norm.buffers() if buffer.is_floating_point()]
        if not buffers:
            return
        joined = torch.cat([buffer.flatten() for buffer in buffers])
        dist.all_reduce(joined)
        parts = torch.split(joined / self.size, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))

    def on_main(self, work: Callable[[], T]) -> T:
        """Run `work` in the main process, and return its result, or raise its error, in all processes."""
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
    """An id of the torchrun that started this process, which also restarts it if another process dies; None if none."""
    return f"torchrun {os.getppid()}" if dist.is_torchelastic_launched() else None


@contextmanager
def join_processes(device: torch.device) -> Iterator[Processes]:
    """The processes started by `torchrun`; without it, a single one."""
    if not dist.is_torchelastic_launched() or int(os.environ["WORLD_SIZE"]) == 1:
        yield Processes(device=device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # The group is kept until the process ends: a second one would find the addresses of the first in the store.
        store, rank, size = torchrun.join()
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        atexit.register(dist.destroy_process_group)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), device)
        dist.barrier()  # no process leaves while another still waits for it
    except RuntimeError as error:
        if not _is_of_a_lost_process(error):
            raise
        raise BastionError(
            "train: another process of this training has ended, and the others cannot go on without it; what it said "
            "before tells why. Go on with the same command and --resume"
        ) from error


def _is_of_a_lost_process(error: RuntimeError) -> bool:
    """gloo has no error class of its own, but names its source file; NCCL's and the store's are kinds of DistError."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)

"""The cost of a model: counted, and timed on this machine."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bastion import rng
from bastion.forward import check_gradient, device_of, frozen, in_mode, logits
from bastion.models.complexity import macs, parameters
from bastion.settings import AtLeastOne, settings
from bastion.studies import studies
from bastion.types import DataSet, Study


@studies.register("complexity")
@settings
class Complexity(Study):
    """Parameters, multiply-accumulates, throughput, cost of backward passes, and peak memory.

    Times are medians over `repeats` passes of `batch` random images on the model's device, with one thread on a CPU.
    They depend on the machine, which should run nothing else.
    """

    batch: AtLeastOne = 16
    repeats: AtLeastOne = 5

    revision = 3
    facts: ClassVar[Mapping[str, str]] = {
        "parameters": "number of parameters",
        "macs": "multiply-accumulates of a forward pass on one image",
        "throughput": "images per second, forward",
        "attack_pass": "time of a forward and backward pass to the image, in forward passes",
        "training_pass": "time of a forward and backward pass to the weights, in forward passes",
        "memory": "peak bytes per image of a forward and backward pass to the weights, without the weights themselves",
    }

    @property
    def reads(self) -> Mapping[str, int | None]:
        return {}

    def __call__(self, model: nn.Module, data: DataSet, part: int, *, seed: int) -> dict[str, Tensor]:
        x = rng.uniform(seed, torch.arange(self.batch), "complexity", data.shape).to(device_of(model))
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]

        def forward() -> None:
            with torch.no_grad():
                logits(model, x)

        def to_the_image() -> None:
            image = x.clone().requires_grad_()
            with frozen(model):
                torch.autograd.grad(logits(model, image).sum(), image)

        def to_the_weights() -> None:
            torch.autograd.grad(logits(model, x).sum(), weights, allow_unused=True)

        with in_mode(model, training=False):
            check_gradient(logits(model, x.clone().requires_grad_()), "costs of a gradient")
            plain, attacking, *training = self._seconds(forward, to_the_image, *[to_the_weights] * bool(weights))
            memory = peak_memory(to_the_weights if weights else to_the_image, x.device)
        return {
            "parameters": torch.tensor(parameters(model)),
            "macs": torch.tensor(macs(model, data.shape)),
            "throughput": torch.tensor(self.batch / plain),
            "attack_pass": torch.tensor(attacking / plain),
            "training_pass": torch.tensor(training[0] / plain if training else math.nan),
            "memory": torch.tensor(memory / self.batch),
        }

    def _seconds(self, *passes: Callable[[], None]) -> list[float]:
        """Median seconds of each pass. They are timed in turn, so that other load on the machine affects all alike."""
        times: list[list[float]] = [[] for _ in passes]
        for _ in range(1 + self.repeats):
            for each, run in zip(times, passes, strict=True):
                _wait()
                began = time.perf_counter()
                run()
                _wait()
                each.append(time.perf_counter() - began)
        return [median(each[1:]) for each in times]  # the first one warms up


def _wait() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def peak_memory(run: Callable[[], None], device: torch.device) -> int:
    """The largest number of bytes of tensors created by `run` that were alive at the same time."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return int(torch.cuda.max_memory_allocated(device)) - before
    live = _LiveTensors()
    with live:
        run()
    return live.peak


class _LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the results of operations until they are freed; not the temporary memory of kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {id(each.untyped_storage()) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                self._add(each.untyped_storage(), given)
        return made

    def _add(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key = id(storage)
        if key in self._known or key in given:  # a view of an existing tensor
            return
        self._known.add(key)
        self._bytes += storage.nbytes()
        self.peak = max(self.peak, self._bytes)
        weakref.finalize(storage, self._drop, key, storage.nbytes())

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._bytes -= size

"""`accelerate(model)`: a form of a model that is cheaper to attack, made once and given to every attack on it.

Attacks search with it; whether a result is adversarial is decided on the model as given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bastion import forward, rng
from bastion.acceleration.copying import cheaper_copy, is_coarse
from bastion.forward import GradientsInside, Wrapped, frozen, is_sharded

# The batch size is chosen so that a forward pass saves about this many bytes for the backward pass: larger batches do
# not fit into the processor's cache. `benchmarks/batch_size.py` measures it.
CPU_CACHE = 32 << 20
GPU_MEMORY = 2 << 30
BATCH_SIZES = (8, 256)
PLAIN_BATCH_SIZE = 128  # without acceleration


class Form(NamedTuple):
    """How a model is run."""

    network: nn.Module
    batch_size: int  # images at once
    freezes: bool  # parameters do not require gradients


class Accelerated(Wrapped):
    """A model that attacks run by `logits`, `batch_size` images at a time, inside `with accelerated.ready(x):`.

    Inside, parameters do not require gradients, unless the model itself computes gradients. Networks run as a copy in
    channels-last format, with BatchNorm folded into the convolutions and linear layers by oneDNN; if no copy can be
    made, or if its logits or gradients differ, the model itself runs. This depends only on the model and the image
    size, and is prepared on first use; weights must not change afterwards.
    """

    def __init__(
        self,
        original: nn.Module,
        *,
        enabled: bool = True,
        batch_size: int = PLAIN_BATCH_SIZE,
        training_step: bool = False,
    ) -> None:
        super().__init__(original, training_step=training_step)
        self.enabled, self.plain = enabled, Form(original, batch_size, freezes=False)
        self.form = self.plain
        self.prepared: dict[tuple[Any, ...], Form] = {}  # by shape, type and device of the images
        self.rounding = 0.0  # rounding error of logits, relative to the largest

    @property
    def network(self) -> nn.Module:
        return self.form.network

    @property
    def batch_size(self) -> int:
        return self.form.batch_size

    @property
    def copied(self) -> bool:
        """Whether the network is a copy of the model as given."""
        return self.network is not self.original

    @contextmanager
    def ready(self, x: Tensor) -> Iterator[Accelerated]:
        """Prepare the model for images of x's shape, type and device, and freeze its parameters inside."""
        self.form = self._form(x)
        with frozen(self.network) if self.form.freezes else nullcontext():
            yield self

    def _form(self, x: Tensor) -> Form:
        if self.training_step or any(part.training for part in self.original.modules()):
            # In train mode BatchNorm sees the batch: all of it runs at once, and never one image alone.
            return Form(self.original, max(len(x), 1), freezes=True)
        if not self.enabled:
            return self.plain
        alike = x.shape[1:], x.dtype, x.device
        if alike not in self.prepared:
            # On noise instead of x, so that the form does not depend on the order in which workers measure batches.
            noise = rng.uniform(0, torch.arange(2), "acceleration", x.shape[1:], dtype=x.dtype).to(x.device)
            self.prepared[alike] = _prepare(self.original, noise)
        return self.prepared[alike]

    def logits(self, x: Tensor) -> Tensor:
        """The model's logits in the precision of the images."""
        return self.taken(forward.logits(self.network, x), x)

    def taken(self, logits: Tensor, x: Tensor) -> Tensor:
        """Logits computed elsewhere, in the precision of the images; sets `rounding` by their own precision."""
        self.rounding = (4 if is_coarse(logits) else 16) * torch.finfo(logits.dtype).eps
        return logits.to(x.dtype)

    @property
    def runs_together(self) -> bool:
        """Whether every pass involves all training processes, so that all must make the same number of passes."""
        shared = any(part.training and getattr(part, "together", False) for part in self.original.modules())
        return self.training_step and (shared or any(is_sharded(each) for each in self.original.parameters()))


def accelerate(model: nn.Module, *, enabled: bool = True) -> Accelerated:
    """The model in a form that is cheaper to attack; an accelerated one is returned unchanged.

    `enabled` False: the model runs without changes.
    """
    return model if isinstance(model, Accelerated) else Accelerated(model, enabled=enabled)


@contextmanager
def for_training(model: nn.Module) -> Iterator[Accelerated]:
    """The model for an attack inside a training step: it is not copied, because weights change after each step, and the
    whole batch runs at once. Inside, parameters do not require gradients."""
    with frozen(model):
        yield Accelerated(model, enabled=False, training_step=True)


def _prepare(model: nn.Module, x: Tensor) -> Form:
    """The form for images of the shape of x, which are two random images."""
    inside = GradientsInside()
    with torch.enable_grad(), inside:
        forward.logits(model, x[:1].detach().requires_grad_())
    if inside.found:  # saved tensors cannot be measured inside torch.func, which such a model may use
        return Form(model, BATCH_SIZES[0], freezes=False)
    has_layers = any(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules())
    network = cheaper_copy(model, x) if has_layers else model
    try:
        with frozen(network):
            return Form(network, _batch_size(network, x[:1]), freezes=True)
    except RuntimeError:  # torch.func, without gradients that are asked for by name
        return Form(model, BATCH_SIZES[0], freezes=False)


def _batch_size(network: nn.Module, x: Tensor) -> int:
    """By the bytes that a forward pass of one image saves for the backward pass, so by model and image size."""
    memory = GPU_MEMORY if x.is_cuda else CPU_CACHE
    fitting: int = 2 ** int(math.log2(max(memory / saved_bytes(network, x), 1)))
    return min(max(fitting, BATCH_SIZES[0]), BATCH_SIZES[1])


def saved_bytes(network: nn.Module, x: Tensor, run: Callable[[Tensor], Any] | None = None) -> int:
    """Bytes that a forward pass on x saves for the backward pass, without the network's parameters.

    `run` is what is run instead of the whole network, such as one of its blocks.
    """
    saved: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}

    def weigh(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(weigh, lambda tensor: tensor):
        (run or partial(forward.logits, network))(x.detach().requires_grad_())
    return max(sum(saved.values()), 1)

"""The model under attack, cheaper to run: `accelerate(model)`, made once and handed to every attack on that model.

The accelerated model only proposes: whether an image fools is judged on the model as given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bastion import forward, rng
from bastion.acceleration.copying import cheaper_copy, is_coarse
from bastion.forward import GradientsInside, Wrapped, frozen

# A batch is as large as keeps what a forward pass saves for the backward pass near this: larger ones leave the
# processor's cache. `benchmarks/batch_size.py` measures it.
CPU_CACHE = 32 << 20
GPU_MEMORY = 2 << 30
BATCH_SIZES = (8, 256)
PLAIN_BATCH_SIZE = 128  # without acceleration


class Form(NamedTuple):
    """How a model is run."""

    network: nn.Module
    batch_size: int  # images at once
    freezes: bool  # parameters collect no gradients


class Accelerated(Wrapped):
    """A model that attacks run by `logits`, `batch_size` images at a time, inside `with accelerated.ready(x):`.

    Parameters collect no gradients inside, but where the model itself asks for them. Convolutional networks run as a
    copy in channels-last format with BatchNorm folded into the convolutions; if a copy cannot be made or does not
    agree, the model itself runs. All of it depends on the model and the size of the images alone,
    and is prepared when it is first needed; weights must not change afterwards.
    """

    def __init__(
        self, given: nn.Module, *, enabled: bool = True, batch_size: int = PLAIN_BATCH_SIZE, training_step: bool = False
    ) -> None:
        super().__init__(given, training_step=training_step)
        self.enabled, self.plain = enabled, Form(given, batch_size, freezes=False)
        self.form = self.plain
        self.prepared: dict[tuple[Any, ...], Form] = {}  # by what is alike in images
        self.rounding = 0.0  # share of the largest logit that another batch, or the model as given, may change

    @property
    def network(self) -> nn.Module:
        return self.form.network

    @property
    def batch_size(self) -> int:
        return self.form.batch_size

    @property
    def copied(self) -> bool:
        """The network is not the model as given, but a copy, whose logits depend on the images alone."""
        return self.network is not self.given

    @contextmanager
    def ready(self, x: Tensor) -> Iterator[Accelerated]:
        """Itself, for passes on images like x."""
        self.form = self._form(x)
        with frozen(self.network) if self.form.freezes else nullcontext():
            yield self

    def _form(self, x: Tensor) -> Form:
        if self.training_step or any(part.training for part in self.given.modules()):
            # In train mode BatchNorm sees the batch: all of it runs at once, and never one image alone.
            return Form(self.given, max(len(x), 1), freezes=True)
        if not self.enabled:
            return self.plain
        alike = x.shape[1:], x.dtype, x.device
        if alike not in self.prepared:
            # Not on x: blocks that are measured in another order, or by another worker, must not get another form.
            noise = rng.uniform(0, torch.arange(2), "acceleration", x.shape[1:], dtype=x.dtype).to(x.device)
            self.prepared[alike] = _prepare(self.given, noise)
        return self.prepared[alike]

    def logits(self, x: Tensor) -> Tensor:
        """In the precision of the images."""
        return self.taken(forward.logits(self.network, x), x)

    def taken(self, logits: Tensor, x: Tensor) -> Tensor:
        """Logits of the model, whoever ran it, in the precision of the images; their own says how far to trust them."""
        self.rounding = (4 if is_coarse(logits) else 16) * torch.finfo(logits.dtype).eps
        return logits.to(x.dtype)

    @property
    def runs_together(self) -> bool:
        """Is each pass made by all processes that train, the inner attack's too? They must then make as many."""
        shared = any(part.training and getattr(part, "together", False) for part in self.given.modules())
        return self.training_step and (shared or any(isinstance(each, DTensor) for each in self.given.parameters()))

    def describe(self) -> dict[str, Any]:
        """How the model was run last, for provenance."""
        return {"enabled": self.enabled, "copied": self.copied, "batch_size": self.batch_size}


def accelerate(model: nn.Module, *, enabled: bool = True) -> Accelerated:
    """The model, cheaper to attack; an accelerated one stays as it is. `enabled` False: it runs as it is."""
    return model if isinstance(model, Accelerated) else Accelerated(model, enabled=enabled)


@contextmanager
def for_training(model: nn.Module) -> Iterator[Accelerated]:
    """What an attack that is a part of a training step is given: weights change after each step, so a copy is not worth
    its making, and all of the batch runs at once. Parameters collect no gradients inside."""
    with frozen(model):
        yield Accelerated(model, enabled=False, training_step=True)


def _prepare(model: nn.Module, x: Tensor) -> Form:
    """Given two images."""
    inside = GradientsInside()
    with torch.enable_grad(), inside:
        forward.logits(model, x[:1].detach().requires_grad_())
    if inside.found:  # torch.func, with which a model may take gradients, bears no look at what it saves
        return Form(model, BATCH_SIZES[0], freezes=False)
    convolves = any(isinstance(module, nn.Conv2d) for module in model.modules())
    network = cheaper_copy(model, x) if convolves else model
    with frozen(network):
        return Form(network, _batch_size(network, x[:1]), freezes=True)


def _batch_size(network: nn.Module, x: Tensor) -> int:
    """From what one image's forward pass leaves for the backward pass: a pure function of model and image size."""
    memory = GPU_MEMORY if x.is_cuda else CPU_CACHE
    fitting: int = 2 ** int(math.log2(max(memory / saved_bytes(network, x), 1)))
    return min(max(fitting, BATCH_SIZES[0]), BATCH_SIZES[1])


def saved_bytes(network: nn.Module, x: Tensor) -> int:
    """What a forward pass on x leaves for the backward pass, besides the network's parameters."""
    saved: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}

    def weigh(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(weigh, lambda tensor: tensor):
        forward.logits(network, x.detach().requires_grad_())
    return max(sum(saved.values()), 1)

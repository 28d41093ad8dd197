"""Attacks made to transfer to other models: MI-FGSM with PNA, PatchOut, self-ensemble, DIM and TI."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bastion import forward, journal, rng
from bastion.attacks import attacks
from bastion.attacks.losses import LOSSES, LossName
from bastion.attacks.pgd import accumulated
from bastion.attention import AttentionMode
from bastion.errors import BastionError
from bastion.forward import Best, check_batch, evaluate, input_gradient, precise, record_zero_grad
from bastion.patches import Grid
from bastion.settings import AtLeastOne, Count, NotNegative, Positive, Share, settings
from bastion.threat import Norm, Threat
from bastion.types import Attack, Batch, tapped


@attacks.register("transferable")
@settings
class Transferable(Attack):
    """MI-FGSM (Dong et al. 2018) from the clean image, with options that improve its transfer to other models.

    The last iterate is returned, as the best one overfits the source; or the clean image, if its loss is higher.
    """

    steps: Count = 10  # gradient steps
    rel_step: Positive | None = None  # length of a step in units of eps; None: 1 / steps
    momentum: NotNegative = 1.0  # decay of the sum of normalised gradients; 0: no momentum
    loss: LossName = "ce"  # that is climbed
    sparsity: Share = 0.01  # l1 only: the share of coordinates that a step changes
    constant_attention: bool = False  # PNA: no gradient through attention maps
    every_block: bool = False  # self-ensemble: the loss is summed over the blocks' outputs
    seen: Share = 1.0  # PatchOut: the share of patches, drawn for each step, whose perturbation the model sees …
    size: AtLeastOne = 8  # … and their side in pixels
    spread: NotNegative = 0.0  # PatchOut: weight of the l2 norm of the perturbation, λ in the paper
    shrink: Share = 1.0  # DIM (Xie et al. 2019): smallest scale to which each step randomly shrinks the images
    blur: NotNegative = 0.0  # TI (Dong et al. 2019): σ, in pixels, of the Gaussian that gradients are convolved with

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        model, batch = check_batch(model, batch, "transferable")
        x0 = batch.x
        length = threat.eps * (self.rel_step if self.rel_step is not None else 1 / max(self.steps, 1))
        x, velocity = x0, torch.zeros_like(x0)
        for step in range(self.steps):
            gradient = self._gradient(model, batch, x, seed=seed, step=step)
            if step == 0:
                record_zero_grad(batch.index, gradient)
            velocity = accumulated(velocity, gradient, self.momentum)
            x = threat.project(x0, threat.step(x, velocity, length, self.sparsity))
        best = Best(x0)
        for candidate in (batch, batch.at(x)):
            best.offer(candidate.x, *evaluate(model, candidate, LOSSES[self.loss]))
        return best.x

    def passes(self, norm: Norm) -> int:
        """With `every_block`, those of the whole model: a pass from a block to the head is short."""
        return self.steps + 1

    def _gradient(self, model: nn.Module, batch: Batch, x: Tensor, *, seed: int, step: int) -> Tensor:
        """The gradient of the loss at x, with the options applied."""
        x0 = batch.x
        mask = self._mask(batch, seed, step)
        seen = torch.where(mask, x, x0).requires_grad_()
        with torch.enable_grad(), constant_attention() if self.constant_attention else nullcontext():
            view = seen if self.shrink == 1 else shrunk(seen, batch.index, self.shrink, seed=seed, step=step)
            made = block_logits(model, view) if self.every_block else [forward.logits(model, view, batch.y)]
            loss = torch.stack([LOSSES[self.loss](precise(logits, x), batch.y) for logits in made])
            gradient = input_gradient(loss, seen) * mask
        journal.passes(batch.index, len(made), 1)
        if self.spread:
            away = x - x0
            gradient = gradient + self.spread * away / away.flatten(1).norm(dim=1).clamp(min=1e-30).view(-1, 1, 1, 1)
        return blurred(gradient, self.blur) if self.blur else gradient

    def _mask(self, batch: Batch, seed: int, step: int) -> Tensor:
        """(B, 1, H, W) bool: the patches that this step sees."""
        if self.seen == 1:
            return torch.ones_like(batch.x[:, :1], dtype=torch.bool)
        grid = Grid.of(batch.x, self.size)
        order = rng.uniform(seed, batch.index, rng.key("patchout", step), (grid.count,), dtype=torch.float64).argsort(1)
        return grid.mask(order[:, : max(1, round(self.seen * grid.count))])


@attacks.register("pna")
def pna(
    *,
    steps: int = 10,
    rel_step: float | None = None,
    momentum: float = 1.0,
    seen: float = 1.0,
    size: int = 8,
    spread: float = 0.0,
) -> Transferable:
    """Pay No Attention (Wei et al. 2022): MI-FGSM with gradients as if the attention maps were constants."""
    return Transferable(
        steps=steps,
        rel_step=rel_step,
        momentum=momentum,
        seen=seen,
        size=size,
        spread=spread,
        constant_attention=True,
    )


@attacks.register("patchout")
def patchout(
    *,
    steps: int = 10,
    rel_step: float | None = None,
    momentum: float = 0.0,
    seen: float = 130 / 196,
    size: int = 8,
    spread: float = 0.1,
) -> Transferable:
    """PatchOut (Wei et al. 2022): each step sees the perturbation of only a random share of the patches."""
    return Transferable(steps=steps, rel_step=rel_step, momentum=momentum, seen=seen, size=size, spread=spread)


@attacks.register("self-ensemble")
def self_ensemble(
    *,
    steps: int = 10,
    rel_step: float | None = None,
    momentum: float = 1.0,
    shrink: float = 1.0,
    blur: float = 0.0,
) -> Transferable:
    """Self-ensemble (Naseer et al. 2022): MI-FGSM on the sum of the losses of all blocks' outputs at the head."""
    return Transferable(steps=steps, rel_step=rel_step, momentum=momentum, shrink=shrink, blur=blur, every_block=True)


@contextmanager
def constant_attention() -> Iterator[None]:
    """Inside, gradients treat attention maps as constants, so that only the path through the values is left."""
    with _ConstantAttention() as mode:
        yield
    if not mode.found:
        raise BastionError(
            "pna: the model ran no softmax over a 4-D tensor and no fused attention, so there is no attention to pay "
            "none to; take another attack (transferable has constant_attention: false), or another model"
        )


class _ConstantAttention(AttentionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = False  # whether the model computed any attention

    def on_map(self, attention: Tensor) -> Tensor:
        self.found = True
        return attention.detach()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not F.multi_head_attention_forward:
            return super().__torch_function__(func, types, args, kwargs)
        self.found = True
        return _values_only(func, *args, **(kwargs or {}))


def _values_only(func: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Multi-head attention as one function: queries, keys and masks, which make up the map, are detached."""
    rest = [_detached(each) for each in args]
    named = {name: _detached(each) for name, each in kwargs.items()}
    return func(query.detach(), key.detach(), value, *rest, **named)


def _detached(argument: Any) -> Any:
    return argument.detach() if isinstance(argument, Tensor) else argument


def block_logits(model: nn.Module, x: Tensor) -> list[Tensor]:
    """For each block, the logits of the model without the blocks after it: its output goes to the norm and head."""
    shown = tapped(model, "self-ensemble")
    with shown.tap("blocks") as taps:
        last = forward.logits(model, x)
    outputs = list(taps.blocks.values())
    if any(output.shape != outputs[-1].shape for output in outputs):
        shapes = ", ".join(sorted({"×".join(map(str, output.shape[1:])) for output in outputs}))
        raise BastionError(
            f"self-ensemble: the head takes any block's output only if all have one shape, these have {shapes}; "
            "take a plain Vision Transformer"
        )
    modules = [block.module for block in shown.blocks()]
    earlier = []
    for output in outputs[:-1]:
        with _blocks_replaced(modules, output):
            earlier.append(model(x.detach()))  # what comes before the blocks is not used
    return [*earlier, last]


@contextmanager
def _blocks_replaced(blocks: list[nn.Module], output: Tensor) -> Iterator[None]:
    """Inside, the first block returns `output`, and the others return their input."""
    for number, block in enumerate(blocks):
        block.__dict__["forward"] = lambda x, *_, number=number, **__: x if number else output
    try:
        yield
    finally:
        for block in blocks:
            del block.__dict__["forward"]


def shrunk(x: Tensor, index: Tensor, smallest: float, *, seed: int, step: int) -> Tensor:
    """Each image at a random scale in [smallest, 1], at a random position on a black image of its size."""
    draws = rng.uniform(seed, index, rng.key("shrink", step), (3,), dtype=x.dtype)
    scale = smallest + (1 - smallest) * draws[:, :1]
    centre = (2 * draws[:, 1:] - 1) * (1 - scale)  # in units of half a side
    # (B, 2, 3): the affine map from the result to the image, in the same units
    place = torch.cat([torch.diag_embed((1 / scale).expand(-1, 2)), (-centre / scale)[:, :, None]], 2)
    return F.grid_sample(x, F.affine_grid(place, list(x.shape), align_corners=False), align_corners=False)


def blurred(gradient: Tensor, sigma: float) -> Tensor:
    """Convolved with a Gaussian, channel by channel; σ = 3 has the paper's 15×15 kernel."""
    radius = max(1, round(7 / 3 * sigma))
    bell = torch.exp(
        -(torch.arange(-radius, radius + 1, dtype=gradient.dtype, device=gradient.device) ** 2) / (2 * sigma**2)
    )
    bell, channels = bell / bell.sum(), gradient.shape[1]
    column = F.conv2d(gradient, bell.view(1, 1, -1, 1).expand(channels, 1, -1, 1), padding=(radius, 0), groups=channels)
    return F.conv2d(column, bell.view(1, 1, 1, -1).expand(channels, 1, 1, -1), padding=(0, radius), groups=channels)

"""Patch-Fool (Fu et al. 2022): patches that attract the attention of a Vision Transformer."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bastion import journal, rng
from bastion.attacks import attacks
from bastion.attacks.losses import ce
from bastion.attacks.patch import (
    SELECTING_BLOCK,
    Choice,
    choose_patches,
    patch_attention,
    random_patch,
)
from bastion.errors import BastionError
from bastion.forward import Best, check_batch, evaluate, input_gradient, misclassified, record_zero_grad
from bastion.patches import Grid
from bastion.settings import AtLeastOne, Count, NotNegative, Positive, Share, settings
from bastion.threat import Norm, Threat
from bastion.types import Attack, Batch

NAME = "patch-fool"


@attacks.register("patch-fool")
@settings
class PatchFool(Attack):
    """Patch-Fool (Fu et al. 2022): maximises the cross-entropy and the attention to the first patch.

    The threat bounds the change of the patches' pixels: linf 1 is the paper's attack, smaller balls its mild variants.
    `pixels` is the sparse variant: at most this many pixels change, and which ones is optimised too. The best iterate
    is returned; the paper's code returns the last one.
    """

    revision = 2

    patches: AtLeastOne = 1
    size: AtLeastOne | None = None  # side of a patch in pixels; None: that of the model's own tokens
    choose: Choice = "attention"
    block: Count = SELECTING_BLOCK  # the block whose attention selects patches; in shallower models the last one
    steps: Count = 250
    rel_step: Positive = (
        0.05  # Adam's step, relative to the largest change of a pixel; the paper's 0.22 when normalised
    )
    decay: Share = 0.95  # of the step, every `decay_every` steps
    decay_every: AtLeastOne = 10
    weight: NotNegative = 0.002  # of the gradients of the attention losses, α in the paper
    pixels: AtLeastOne | None = None
    pixel_step: Positive = 0.01  # sparse variant: Adam's step for the scores that select pixels
    pixel_steps: Count = 200  # sparse variant: after this many steps the selection of pixels is final

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        model, batch = check_batch(model, batch, NAME)
        best = Best(batch.x)
        best.offer(batch.x, *evaluate(model, batch, ce))
        grid, chosen = self._patches(model, batch, seed)
        optimizer = PatchOptimizer(self, batch, threat, grid.mask(chosen), seed=seed)
        first = grid.mask(chosen[:, :1])
        for step in range(self.steps):
            x = optimizer.image()
            loss, wrong, gradients = losses_and_grads(model, batch.at(x), first if self.weight else None)
            if step == 0:
                record_zero_grad(batch.index, gradients[0] * optimizer.allowed)
            best.offer(x, loss, wrong)
            optimizer.step(gradients, step)
        x = optimizer.image()
        best.offer(x, *evaluate(model, batch.at(x), ce))
        return best.x

    def passes(self, norm: Norm) -> int:
        return self.steps + 1 + (self.choose != "random")

    def _patches(self, model: nn.Module, batch: Batch, seed: int) -> tuple[Grid, Tensor]:
        """The grid, and (B, patches) numbers of the chosen ones."""
        grid = Grid.of(batch.x, self.size or _token_size(model, batch.x))
        draw = rng.key(NAME, "patches")
        chosen = choose_patches(
            model, batch, grid, self.choose, self.patches, seed=seed, draw=draw, where=NAME, block=self.block
        )
        return grid, chosen


class PatchOptimizer:
    """The patches being optimised: their pixel values and, in the sparse variant, the scores that select pixels."""

    def __init__(self, attack: PatchFool, batch: Batch, threat: Threat, allowed: Tensor, *, seed: int) -> None:
        self.attack, self.threat, self.allowed, self.x0 = attack, threat, allowed, batch.x.detach()
        self.colours = random_patch(threat, self.x0, allowed, batch.index, seed=seed, draw=rng.key(NAME, "start"))
        # (B, 1, H, W): the pixels with the highest scores are changed
        self.scores = rng.uniform(seed, batch.index, rng.key(NAME, "pixels"), allowed.shape[1:], dtype=self.x0.dtype)
        self.colour_optimizer = _adam(self.colours, attack.rel_step * min(threat.eps, 1.0))
        self.score_optimizer = _adam(self.scores, attack.pixel_step)

    def image(self) -> Tensor:
        """The attacked images, inside the threat's set."""
        selected = self._selected()
        x = self.threat.project(self.x0, torch.where(selected, self.colours, self.x0))
        self.colours.copy_(torch.where(selected, x, self.colours))
        return x

    def step(self, gradients: list[Tensor], step: int) -> None:
        """One ascent step of Adam along the merged gradients, which are with respect to the image."""
        selected, weight = self._selected(), self.attack.weight
        self.colours.grad = merged([gradient * selected for gradient in gradients], weight)
        if self.attack.pixels and step < self.attack.pixel_steps:
            # Straight-through gradient of the selection, as if the image were x0 + score·(colour - x0).
            change = self.allowed * (self.colours - self.x0)
            self.scores.grad = merged([(gradient * change).sum(1, keepdim=True) for gradient in gradients], weight)
            self.score_optimizer.step()
        self.colour_optimizer.step()
        if (step + 1) % self.attack.decay_every == 0:
            self.colour_optimizer.param_groups[0]["lr"] *= self.attack.decay

    def _selected(self) -> Tensor:
        """(B, 1, H, W) bool: the pixels that are changed."""
        if self.attack.pixels is None:
            return self.allowed
        ranked = (
            self.scores.masked_fill(~self.allowed, -torch.inf).flatten(1).argsort(stable=True, dim=1, descending=True)
        )
        picked = torch.zeros_like(self.allowed).flatten(1).scatter(1, ranked[:, : self.attack.pixels], True)
        return picked.view_as(self.allowed) & self.allowed


class LossesAndGrads(NamedTuple):
    loss: Tensor  # (B,) cross-entropy
    fooled: Tensor  # bool (B,)
    gradients: list[Tensor]  # of the cross-entropy, then of each block's attention to the first patch


def losses_and_grads(model: nn.Module, batch: Batch, first: Tensor | None) -> LossesAndGrads:
    """Losses and their gradients with respect to x; `first` is the mask of the first patch, None: no attention loss."""
    x, y = batch.x.detach().requires_grad_(), batch.y
    with torch.enable_grad():
        logits, maps = patch_attention(model, x, NAME)
        loss = ce(logits, y)
        losses = [loss]
        if first is not None:
            losses += [log_attention(maps[block], first) for block in attention_blocks(len(maps))]
        gradients = [input_gradient(each, x, keep_graph=True) for each in losses]
    journal.passes(batch.index, 1, len(losses))
    return LossesAndGrads(loss.detach(), misclassified(logits.detach(), y), gradients)


def log_attention(attention: Tensor, patch: Tensor) -> Tensor:
    """(B,): J of Patch-Fool, the log of the attention (B, queries, rows, columns) to a patch, mean over queries.

    If patches are not aligned with tokens, a token counts by the share of its pixels inside the patch.
    """
    share = F.adaptive_avg_pool2d(
        patch.to(attention.dtype), (attention.shape[2], attention.shape[3])
    )  # (B, 1, rows, columns)
    total = (attention * share).sum((2, 3)).clamp(min=torch.finfo(attention.dtype).tiny)
    return total.log().mean(1)


def attention_blocks(depth: int) -> list[int]:
    """The blocks with an attention loss: the first half except the first one; in very shallow models the first."""
    return list(range(1, depth // 2)) or [0]


def merged(gradients: list[Tensor], weight: float) -> Tensor:
    """The first gradient, plus the weighted sum of the others without their components opposed to it."""
    main, *others = gradients
    return main + weight * sum((without_conflict(other, main) for other in others), torch.zeros_like(main))


def without_conflict(gradient: Tensor, main: Tensor) -> Tensor:
    """PCGrad (Yu et al. 2020), for each example: a gradient opposed to `main` is projected orthogonally to it."""
    unit = main / main.abs().amax((1, 2, 3), keepdim=True).clamp(min=1e-38)  # scaled, so that squares do not underflow
    inner = (gradient * unit).sum((1, 2, 3), keepdim=True).clamp(max=0)
    return gradient - inner / unit.square().sum((1, 2, 3), keepdim=True).clamp(min=1e-38) * unit


def _adam(values: Tensor, step: float) -> torch.optim.Adam:
    """Adam for ascent. Gradients of a confident model are tiny, so `eps` must be much smaller."""
    return torch.optim.Adam([values], lr=step, eps=1e-12, maximize=True)


def _token_size(model: nn.Module, x: Tensor) -> int:
    """The side, in pixels, of the model's patch tokens."""
    with torch.no_grad():
        rows, columns = patch_attention(model, x[:1], NAME)[1][0].shape[2:]
    if x.shape[2] % rows or x.shape[2] // rows * columns != x.shape[3]:
        raise BastionError(
            f"{NAME}: an image of {x.shape[2]}×{x.shape[3]} does not divide into the model's {rows}×{columns} tokens; "
            "give the size of a patch in pixels"
        )
    return x.shape[2] // rows

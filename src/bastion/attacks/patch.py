"""Attacks that touch a few patches of the image only: PGD, noise added, and occlusion by noise (Eq. 1 of RSPC)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bastion import forward, journal, rng
from bastion.attacks import attacks
from bastion.attacks.losses import LOSSES, LossName, ce
from bastion.attacks.pgd import ascend
from bastion.errors import BastionError
from bastion.forward import Best, Loss, check_batch, evaluate, loss_and_grad
from bastion.settings import AtLeastOne, Count, Positive, Share, settings
from bastion.threat import Threat, length
from bastion.types import Attack, Batch, Tapped

Choice = Literal["gradient", "random", "attention"]
SELECTING_BLOCK = 4  # whose attention tells patches apart, as in the code of Patch-Fool


@attacks.register("patch-pgd")
@settings
class PatchPGD(Attack):
    """PGD (Madry et al. 2018) on chosen patches; the threat bounds the pixels inside, linf 1 leaves them free."""

    patches: AtLeastOne = 1
    share: Share | None = None  # of all patches, instead of a number of them
    size: AtLeastOne = 8  # side of a patch in pixels
    choose: Choice = "gradient"
    steps: Count = 20
    rel_step: Positive | None = None  # length of a step in units of eps; None: 2.5 / steps
    restarts: AtLeastOne = 1  # random patches are drawn anew for each
    random_start: bool = True
    loss: LossName = "ce"
    sparsity: Share = 0.01  # l1 only: the share of the image's coordinates that a step moves

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        model, batch = check_batch(model, batch, "patch-pgd")
        x0, loss, steps, sparsity = batch.x, LOSSES[self.loss], self.steps, self.sparsity
        size = threat.eps * (self.rel_step if self.rel_step is not None else 2.5 / max(steps, 1))
        grid, best = Grid.of(x0, self.size), Best(x0)
        best.offer(x0, *evaluate(model, batch, loss))
        count = grid.share(self.share) if self.share is not None else self.patches
        draws = masks(model, batch, grid, self.choose, count, seed=seed, where="patch-pgd", times=self.restarts)
        for restart, mask in enumerate(draws):
            draw = rng.key("patch-pgd", restart)
            x = random_patch(threat, x0, mask, batch.index, seed=seed, draw=draw) if self.random_start else x0
            ascend(model, batch, threat, loss, x, steps=steps, size=size, sparsity=sparsity, mask=mask, best=best)
        return best.x


@attacks.register("patch-noise")
@settings
class PatchNoise(Attack):
    """Noise added to chosen patches (RSPC, Fig. 1), here uniform in the threat; the worst of `draws` is kept."""

    patches: AtLeastOne = 1
    size: AtLeastOne = 8
    choose: Choice = "random"
    draws: AtLeastOne = 1  # random patches are drawn anew for each
    loss: LossName = "ce"

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        model, batch = check_batch(model, batch, "patch-noise")
        x0 = batch.x
        grid = Grid.of(x0, self.size)
        draws = masks(model, batch, grid, self.choose, self.patches, seed=seed, where="patch-noise", times=self.draws)
        candidates = (
            random_patch(threat, x0, mask, batch.index, seed=seed, draw=rng.key("patch-noise", number))
            for number, mask in enumerate(draws)
        )
        return _worst(model, batch, candidates, LOSSES[self.loss])


@attacks.register("patch-occlusion")
@settings
class PatchOcclusion(Attack):
    """Eq. 1 of RSPC: a share of the patches is replaced by uniform noise; the worst of `draws` is kept.

    The noise is uniform in [0, 1] and brought into the threat's set; linf 1 leaves it as it is.
    """

    share: Share = 0.1  # of the patches, ρ in the paper; at least one patch
    size: AtLeastOne = 8
    choose: Choice = "random"
    draws: AtLeastOne = 1  # random patches are drawn anew for each
    loss: LossName = "ce"

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        model, batch = check_batch(model, batch, "patch-occlusion")
        x0 = batch.x
        grid = Grid.of(x0, self.size)
        count = grid.share(self.share)
        draws = masks(model, batch, grid, self.choose, count, seed=seed, where="patch-occlusion", times=self.draws)
        candidates = (
            threat.project(x0, torch.where(mask, _noise(x0, batch.index, seed, number), x0))
            for number, mask in enumerate(draws)
        )
        return _worst(model, batch, candidates, LOSSES[self.loss])


@attacks.register("patch-gaussian")
@settings
class PatchGaussian(Attack):
    """Gaussian noise added to a share of the patches and clipped (Fig. 1 of RSPC); the worst of `draws` is kept.

    The default is the strongest noise of ImageNet-C. It is brought into the threat's set; linf 1 leaves it as it is.
    """

    sigma: Positive = 0.38
    share: Share = 0.1  # of the patches; at least one patch
    size: AtLeastOne = 8
    choose: Choice = "random"
    draws: AtLeastOne = 1  # random patches are drawn anew for each
    loss: LossName = "ce"

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        model, batch = check_batch(model, batch, "patch-gaussian")
        x0 = batch.x
        grid = Grid.of(x0, self.size)
        count = grid.share(self.share)
        draws = masks(model, batch, grid, self.choose, count, seed=seed, where="patch-gaussian", times=self.draws)

        def noisy(number: int) -> Tensor:
            draw = rng.key("patch-gaussian", number)
            noise = rng.normal(seed, batch.index, draw, x0.shape[1:], dtype=x0.dtype)
            return (x0 + self.sigma * noise).clamp(0, 1)

        candidates = (threat.project(x0, torch.where(mask, noisy(number), x0)) for number, mask in enumerate(draws))
        return _worst(model, batch, candidates, LOSSES[self.loss])


@dataclass(frozen=True)
class Grid:
    """The patches of an image, numbered row by row; those at the right and the bottom edge may be cut off."""

    height: int
    width: int
    size: int

    @classmethod
    def of(cls, x: Tensor, size: int) -> Grid:
        height, width = x.shape[2:]
        if size > max(height, width):
            raise BastionError(f"patches of {size}×{size} pixels are larger than the image of {height}×{width}")
        return cls(height, width, size)

    @property
    def shape(self) -> tuple[int, int]:
        return -(-self.height // self.size), -(-self.width // self.size)

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def share(self, share: float) -> int:
        """So many patches are this share of all, at least one."""
        return max(1, round(share * self.count))

    def numbers(self, device: torch.device) -> Tensor:
        """(H, W) the patch that each pixel belongs to."""
        rows = torch.arange(self.height, device=device) // self.size
        columns = torch.arange(self.width, device=device) // self.size
        return rows[:, None] * self.shape[1] + columns

    def sums(self, pixels: Tensor) -> Tensor:
        """(B, count) of (B, H, W)."""
        sums = pixels.new_zeros(len(pixels), self.count)
        return sums.index_add_(1, self.numbers(pixels.device).flatten(), pixels.flatten(1))

    def mask(self, chosen: Tensor) -> Tensor:
        """(B, 1, H, W) bool: the pixels of the patches whose numbers (B, n) are given."""
        picked = torch.zeros(len(chosen), self.count, dtype=torch.bool, device=chosen.device)
        return picked.scatter(1, chosen, True)[:, self.numbers(chosen.device)][:, None]


def choose_patches(
    model: nn.Module,
    batch: Batch,
    grid: Grid,
    how: Choice,
    count: int,
    *,
    seed: int,
    draw: int,
    where: str,
    block: int = SELECTING_BLOCK,
) -> Tensor:
    """(B, count) numbers of patches, the most promising first."""
    if count > grid.count:
        raise BastionError(
            f"{where}: {count} patches of {grid.size}×{grid.size} pixels asked for, an image of "
            f"{grid.height}×{grid.width} has {grid.count}; ask for fewer or smaller ones"
        )
    if how == "random":
        scores = rng.uniform(seed, batch.index, draw, (grid.count,), dtype=torch.float64)
    elif how == "gradient":
        scores = grid.sums(loss_and_grad(model, batch, ce)[2].abs().sum(1))
    else:
        scores = _attention_scores(model, batch, grid, block, where)
    return scores.argsort(stable=True, dim=1, descending=True)[:, :count]


def masks(
    model: nn.Module, batch: Batch, grid: Grid, how: Choice, count: int, *, seed: int, where: str, times: int
) -> Iterator[Tensor]:
    """`times` masks (B, 1, H, W): of new patches each if they are random, else always the same."""
    for number in range(times):
        if number == 0 or how == "random":
            draw = rng.key(where, "patches", number)
            mask = grid.mask(choose_patches(model, batch, grid, how, count, seed=seed, draw=draw, where=where))
        yield mask


def random_patch(threat: Threat, x0: Tensor, mask: Tensor, index: Tensor, *, seed: int, draw: int) -> Tensor:
    """A uniform point of the threat's set among those that leave x0 outside of the mask as it is.

    For l2 and l1 uniform in the ball and then brought into the box.
    """
    if threat.norm == "linf":
        low, high = (x0 - threat.eps).clamp(min=0), (x0 + threat.eps).clamp(max=1)
        inside = low + (high - low) * rng.uniform(seed, index, draw, x0.shape[1:], dtype=x0.dtype)
        return threat.project(x0, torch.where(mask, inside, x0))
    # Some coordinates of a uniform point of a ball have a uniform direction; their length is made that of their ball.
    offset = torch.where(mask, threat.random_point(x0, index, seed=seed, draw=draw) - x0, 0)
    size = mask.flatten(1).sum(1) * x0.shape[1]
    radius = threat.eps * rng.uniform(seed, index, rng.key(draw, "radius"), dtype=torch.float64) ** (1 / size)
    scale = (radius / length(threat.norm, offset.double()).clamp(min=1e-30)).to(x0.dtype)
    return threat.project(x0, x0 + scale.view(-1, 1, 1, 1) * offset)


def patch_attention(model: nn.Module, x: Tensor, where: str) -> tuple[Tensor, list[Tensor]]:
    """Logits, and the attention of each block in order: (B, queries, rows, columns), the mean over heads, in the graph.

    Rows and columns are those of the image's tokens; class and register tokens, which come first, are left out.
    Blocks that do not attend over all the tokens they put out (windows, channels) are passed over.
    """
    if not isinstance(model, Tapped):
        raise BastionError(
            f"{where}: needs the attention maps of the model, and {type(model).__name__} does not show any; "
            "give a bastion Classifier with attention"
        )
    try:
        with model.tap("attention", "blocks") as taps:
            logits = forward.logits(model, x)
    except BastionError as error:
        raise BastionError(
            f"{where}: needs the attention maps of the model; {error}; take another attack, or leave the probe out of "
            "the suite (--set probes.LABEL=null)"
        ) from error
    maps = [
        _on_the_image(attention.mean(1), x)
        for name, attention in taps.attention.items()
        if len(attention) == len(x) and attention.shape[3] == taps.blocks[name].shape[1]
    ]
    if not maps:
        raise BastionError(f"{where}: no block of the model attends over all tokens of the image; take another attack")
    return logits, maps


def _noise(x0: Tensor, index: Tensor, seed: int, number: int) -> Tensor:
    return rng.uniform(seed, index, rng.key("patch-occlusion", number), x0.shape[1:], dtype=x0.dtype)


def _worst(model: nn.Module, batch: Batch, candidates: Iterable[Tensor], loss: Loss) -> Tensor:
    """What is worst for the model, the image itself among them."""
    best = Best(batch.x)
    best.offer(batch.x, *evaluate(model, batch, loss))
    for x in candidates:
        best.offer(x, *evaluate(model, batch.at(x), loss))
    return best.x


def _attention_scores(model: nn.Module, batch: Batch, grid: Grid, block: int, where: str) -> Tensor:
    """(B, count) the attention that each patch gets, the mean over heads and queries."""
    with torch.no_grad():
        _, maps = patch_attention(model, batch.x, where)
    journal.passes(batch.index, 1, 0)
    attention = maps[min(block, len(maps) - 1)].mean(1, keepdim=True)
    return grid.sums(F.interpolate(attention, (grid.height, grid.width), mode="nearest")[:, 0])


def _on_the_image(attention: Tensor, x: Tensor) -> Tensor:
    """(B, queries, rows, columns) of (B, queries, tokens): the largest grid of the image's proportions that fits."""
    height, width = x.shape[2] // math.gcd(*x.shape[2:]), x.shape[3] // math.gcd(*x.shape[2:])
    side = math.isqrt(attention.shape[2] // (height * width))
    rows, columns = side * height, side * width
    if not rows:
        raise BastionError(f"attention over {attention.shape[2]} tokens: no grid of a {x.shape[2]}×{x.shape[3]} image")
    return attention[:, :, attention.shape[2] - rows * columns :].reshape(*attention.shape[:2], rows, columns)

"""Attacks that change only a few patches of the image: PGD, added noise, and occlusion by noise (Eq. 1 of RSPC)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bastion import forward, journal, rng
from bastion.attacks import attacks
from bastion.attacks.losses import LOSSES, LossName, ce
from bastion.attacks.pgd import ascend
from bastion.errors import BastionError
from bastion.forward import Best, check_batch, evaluate, loss_and_grad
from bastion.patches import Grid, token_grid
from bastion.settings import AtLeastOne, Count, Positive, Share, settings
from bastion.threat import Norm, Threat, length
from bastion.types import Attack, Batch, Taps, tapped

Choice = Literal["gradient", "random", "attention"]
SELECTING_BLOCK = 4  # the block whose attention selects patches, as in the code of Patch-Fool


@attacks.register("patch-pgd")
@settings
class PatchPGD(Attack):
    """PGD (Madry et al. 2018) on chosen patches; the threat bounds the change of their pixels, linf 1 allows any."""

    revision = 2
    patches: AtLeastOne = 1
    share: Share | None = None  # of all patches, instead of `patches`
    size: AtLeastOne = 8  # side of a patch in pixels
    choose: Choice = "gradient"
    steps: Count = 20
    rel_step: Positive | None = None  # length of a step in units of eps; None: 2.5 / steps
    restarts: AtLeastOne = 1  # each with new random patches, if `choose` is random
    random_start: bool = True
    loss: LossName = "ce"
    sparsity: Share = 0.01  # l1 only: the share of the image's coordinates that a step changes

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        model, batch = check_batch(model, batch, "patch-pgd")
        grid, best = Grid.of(batch.x, self.size), Best(batch.x)
        best.offer(batch.x, *evaluate(model, batch, LOSSES[self.loss]))
        count = grid.share(self.share) if self.share is not None else self.patches
        draws = masks(model, batch, grid, self.choose, count, seed=seed, where="patch-pgd", times=self.restarts)
        for restart, mask in enumerate(draws):
            self.search(model, batch, threat, mask, seed=seed, draw=rng.key("patch-pgd", restart), best=best)
        return best.x

    def passes(self, norm: Norm) -> int:
        return self.restarts * (self.steps + 1) + (self.choose != "random")

    def search(
        self,
        model: nn.Module,
        batch: Batch,
        threat: Threat,
        mask: Tensor,
        *,
        seed: int,
        draw: int,
        best: Best | None = None,
    ) -> Tensor:
        """One search on the pixels of a mask (B, 1, H, W); returns its last iterate."""
        x, loss, steps, sparsity = batch.x, LOSSES[self.loss], self.steps, self.sparsity
        size = threat.eps * (self.rel_step if self.rel_step is not None else 2.5 / max(steps, 1))
        if self.random_start:
            x = random_patch(threat, x, mask, batch.index, seed=seed, draw=draw)
        return ascend(model, batch, threat, loss, x, steps=steps, size=size, sparsity=sparsity, mask=mask, best=best)


@settings
class FilledPatches(Attack):
    """Fills chosen patches at random; of `draws` results and the image itself, the highest loss is returned."""

    name: ClassVar[str]
    size: AtLeastOne = 8  # side of a patch in pixels
    choose: Choice = "random"
    draws: AtLeastOne = 1  # each with new random patches, if `choose` is random
    loss: LossName = "ce"

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        where = self.name
        model, batch = check_batch(model, batch, where)
        grid, best, loss = Grid.of(batch.x, self.size), Best(batch.x), LOSSES[self.loss]
        best.offer(batch.x, *evaluate(model, batch, loss))
        count = self.count(grid)
        draws = masks(model, batch, grid, self.choose, count, seed=seed, where=where, times=self.draws)
        for number, mask in enumerate(draws):
            x = self.filled(batch, mask, threat, seed=seed, draw=rng.key(where, number))
            best.offer(x, *evaluate(model, batch.at(x), loss))
        return best.x

    def passes(self, norm: Norm) -> int:
        return self.draws + (self.choose != "random")

    def filled(self, batch: Batch, mask: Tensor, threat: Threat, *, seed: int, draw: int) -> Tensor:
        """The images with the pixels of a mask (B, 1, H, W) filled."""
        filled = self.fill(batch.x, batch.index, mask, threat, seed=seed, draw=draw)
        return threat.project(batch.x, torch.where(mask, filled, batch.x))

    def count(self, grid: Grid) -> int:
        """The number of patches that are filled."""
        raise NotImplementedError

    def fill(self, x0: Tensor, index: Tensor, mask: Tensor, threat: Threat, *, seed: int, draw: int) -> Tensor:
        """Images whose pixels inside the mask are used."""
        raise NotImplementedError


@attacks.register("patch-noise")
@settings
class PatchNoise(FilledPatches):
    """Noise added to chosen patches (RSPC, Fig. 1), uniform in the threat's set; the worst of `draws` is kept."""

    name = "patch-noise"
    patches: AtLeastOne = 1

    def count(self, grid: Grid) -> int:
        return self.patches

    def fill(self, x0: Tensor, index: Tensor, mask: Tensor, threat: Threat, *, seed: int, draw: int) -> Tensor:
        return random_patch(threat, x0, mask, index, seed=seed, draw=draw)


@settings
class SharePatches(FilledPatches):
    """Fills a share of the patches; the result is projected into the threat's set, which linf 1 leaves unchanged."""

    revision = 2
    share: Share = 0.1  # of the patches, ρ in RSPC

    def count(self, grid: Grid) -> int:
        return grid.share(self.share)


@attacks.register("patch-occlusion")
@settings
class PatchOcclusion(SharePatches):
    """Eq. 1 of RSPC: a share of the patches is replaced by uniform noise; the worst of `draws` is kept."""

    name = "patch-occlusion"

    def fill(self, x0: Tensor, index: Tensor, mask: Tensor, threat: Threat, *, seed: int, draw: int) -> Tensor:
        return rng.uniform(seed, index, draw, x0.shape[1:], dtype=x0.dtype)


@attacks.register("patch-gaussian")
@settings
class PatchGaussian(SharePatches):
    """Gaussian noise added to a share of the patches and clipped (Fig. 1 of RSPC); the worst of `draws` is kept.

    The default is the strongest noise of ImageNet-C.
    """

    name = "patch-gaussian"
    sigma: Positive = 0.38

    def fill(self, x0: Tensor, index: Tensor, mask: Tensor, threat: Threat, *, seed: int, draw: int) -> Tensor:
        noise = rng.normal(seed, index, draw, x0.shape[1:], dtype=x0.dtype)
        return (x0 + self.sigma * noise).clamp(0, 1)


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
    """(B, count): numbers of patches, those with the largest gradient or attention first."""
    if count > grid.count:
        raise BastionError(
            f"{where}: {count} patches of {grid.size}×{grid.size} pixels asked for, an image of "
            f"{grid.height}×{grid.width} has {grid.count}; ask for fewer or smaller ones"
        )
    if how == "random":
        return grid.random(batch.index, count, seed=seed, draw=draw)
    if how == "gradient":
        scores = grid.sums(loss_and_grad(model, batch, ce)[2].abs().sum(1))
    else:
        scores = _attention_scores(model, batch, grid, block, where)
    return grid.highest(scores, count)


def masks(
    model: nn.Module, batch: Batch, grid: Grid, how: Choice, count: int, *, seed: int, where: str, times: int
) -> Iterator[Tensor]:
    """`times` masks (B, 1, H, W) of the chosen patches: new ones each time if they are random, else the same."""
    for number in range(times):
        if number == 0 or how == "random":
            draw = rng.key(where, "patches", number)
            mask = grid.mask(choose_patches(model, batch, grid, how, count, seed=seed, draw=draw, where=where))
        yield mask


def random_patch(threat: Threat, x0: Tensor, mask: Tensor, index: Tensor, *, seed: int, draw: int) -> Tensor:
    """A random image of the threat's set that equals x0 outside the mask.

    For linf uniform in the set; for l2 and l1 uniform in the ball, then clipped to the box.
    """
    if threat.norm == "linf":
        low, high = (x0 - threat.eps).clamp(min=0), (x0 + threat.eps).clamp(max=1)
        inside = low + (high - low) * rng.uniform(seed, index, draw, x0.shape[1:], dtype=x0.dtype)
        return threat.project(x0, torch.where(mask, inside, x0))
    # Masked, a uniform point of the ball still has a uniform direction; its length is drawn for the lower dimension.
    offset = torch.where(mask, threat.random_point(x0, index, seed=seed, draw=draw) - x0, 0)
    size = mask.flatten(1).sum(1) * x0.shape[1]
    radius = threat.eps * rng.uniform(seed, index, rng.key(draw, "radius"), dtype=torch.float64) ** (1 / size)
    scale = (radius / length(threat.norm, offset.double()).clamp(min=1e-30)).to(x0.dtype)
    return threat.project(x0, x0 + scale.view(-1, 1, 1, 1) * offset)


def patch_attention(model: nn.Module, x: Tensor, where: str) -> tuple[Tensor, list[Tensor]]:
    """Logits, and the attention of each block in order, (B, queries, rows, columns), the mean over heads, in the graph.

    Keys are on the grid of patch tokens; class and register tokens are left out. Blocks whose attention is not over all
    tokens (windows, channels) are skipped.
    """
    logits, taps = attention_taps(model, x, where)
    maps = [
        on_patch_grid(attention.mean(1), x)
        for name, attention in taps.attention.items()
        if len(attention) == len(x) and attention.shape[3] == taps.blocks[name].shape[1]
    ]
    if not maps:
        raise BastionError(f"{where}: no block of the model attends over all tokens of the image; take another attack")
    return logits, maps


def attention_taps(model: nn.Module, x: Tensor, where: str) -> tuple[Tensor, Taps]:
    """Logits, and the attention maps and outputs of the model's blocks, in the graph."""
    shown = tapped(model, where)
    try:
        with shown.tap("attention", "blocks") as taps:
            return forward.logits(model, x), taps
    except BastionError as error:
        raise BastionError(
            f"{where}: needs the attention maps of the model; {error}; leave the probe out of the suite (--set "
            "probes.LABEL=null)"
        ) from error


def _attention_scores(model: nn.Module, batch: Batch, grid: Grid, block: int, where: str) -> Tensor:
    """(B, count): the attention to each patch, mean over heads and queries."""
    with torch.no_grad():
        _, maps = patch_attention(model, batch.x, where)
    journal.passes(batch.index, 1, 0)
    attention = maps[min(block, len(maps) - 1)].mean(1, keepdim=True)
    return grid.sums(F.interpolate(attention, (grid.height, grid.width), mode="nearest")[:, 0])


def on_patch_grid(attention: Tensor, x: Tensor) -> Tensor:
    """(B, queries, tokens) to (B, queries, rows, columns), without class and register tokens, which come first."""
    rows, columns = token_grid(attention.shape[2], *x.shape[2:])
    return attention[:, :, attention.shape[2] - rows * columns :].reshape(*attention.shape[:2], rows, columns)

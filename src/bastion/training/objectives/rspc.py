"""RSPC (Guo et al. 2023): align features of clean images and of images with the most sensitive patches occluded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bastion import rng
from bastion.forward import check_gradient, in_mode
from bastion.models.classifier import Classifier
from bastion.models.corruption_model import CorruptionModel, keep_mask
from bastion.patches import token_grid
from bastion.settings import AtLeastOne, NotNegative, Positive, SettingsError, Share, Smoothing, settings
from bastion.training.objectives import objectives
from bastion.types import Batch, Losses, Objective, Prepared, Tapped, Taps, TrainingContext

Term = Literal["alignment", "cross-entropy"]
MOST_PATCHES = 256  # by default, as the corruption model has a weight for each pair of patches


@objectives.register("rspc")
@settings(frozen=False, eq=False)
class RSPC(Objective):
    """CE(x) + weight · alignment(x, x̂), the mean squared change of the outputs of attention blocks (Eq. 3).

    x̂ is x with a share `rho` of its patches occluded: those with the highest scores of the corruption model, which is
    trained beside the model to maximise the alignment term; or random ones.
    """

    weight: NotNegative = 5e-3  # λ
    rho: Share = 0.1
    patches: Literal["learned", "random"] = "learned"
    patch_size: AtLeastOne | None = None  # pixels, of the images at the network's size; None: as the model's tokens
    fill: Literal["noise", "zero"] = "noise"
    minimize: Term = "alignment"  # "cross-entropy": ½ CE(x) + ½ CE(x̂) instead
    maximize: Term | None = None  # by the corruption model; None: the same term
    label_smoothing: Smoothing = 0.0
    corruption_lr: Positive = 1e-4
    # Factor of the corruption model's gradient, before it is clipped. The authors' code does not divide that gradient
    # by the loss scale of fp16, initially 2^16; without the factor, steps of 1e-4 change almost nothing.
    grad_scale: Positive = 65536.0

    def __post_init__(self) -> None:
        if self.patches == "random" and self.maximize:
            raise SettingsError("rspc", ("maximize",), "random patches maximize nothing; leave it out")

    def setup(self, context: TrainingContext) -> None:
        model = context.model
        _, *shape = _resized(model, torch.zeros(1, *context.data.shape)).shape
        attending = _attention_outputs(model, shape)
        aligns = "alignment" in (self.minimize, self.maximize)
        if not attending and (aligns or self.patch_size is None):
            raise ValueError(
                "rspc aligns the outputs of self-attention blocks, and this model has none; take another model, or set "
                "minimize: cross-entropy and a patch_size"
            )
        self._aligned = list(attending) if aligns else []
        size = self.patch_size or default_patch_size([output.shape[1:] for output in attending.values()], shape)
        corruption_model = CorruptionModel(shape, size)
        self._grid = corruption_model.grid
        if self.patches == "random":
            return
        self.networks, self.clip_grad = corruption_model, 5.0
        self.optimizer = torch.optim.SGD(
            corruption_model.parameters(),
            lr=self.corruption_lr,
            momentum=0.9,
            nesterov=True,
            weight_decay=0.05,  # shrinks the weights also with maximize=True
            maximize=True,
        )

    def prepare(self, model: nn.Module, batch: Batch, *, progress: float, seed: int) -> Prepared:
        """Images of the filling (noise or black); with random patches, the occluded images. At the network's size."""
        batch = batch._replace(x=_resized(model, batch.x))
        x = torch.zeros_like(batch.x)
        if self.fill == "noise":
            x = rng.uniform(seed, batch.index, "rspc noise", batch.x.shape[1:], dtype=batch.x.dtype)
        if self.patches == "random":
            count, draw = self._grid.share(self.rho), rng.key("rspc patches")
            mask = self._grid.mask(self._grid.random(batch.index, count, seed=seed, draw=draw))
            x = torch.where(mask, x, batch.x)
        return Prepared(batch, x, {})

    def loss(self, model: nn.Module, prepared: Prepared) -> Losses:
        x, y, occluded = prepared.clean.x, prepared.clean.y, prepared.x
        keep = used = None
        if self.networks is not None:
            count, processes = self._grid.share(self.rho), dist.get_world_size() if dist.is_initialized() else 1
            scores = self.networks(x)
            keep = keep_mask(scores, self._grid, count, grad_scale=self.grad_scale, processes=processes)
            used = keep if self.maximize in (None, self.minimize) else keep.detach().requires_grad_()
            occluded = used * x + (1 - used) * occluded  # Eq. 1
        with cast(Tapped, model).tap("blocks") if self._aligned else nullcontext(Taps()) as taps:
            clean, corrupted = model(torch.cat([x, occluded])).chunk(2)
        natural, other = (F.cross_entropy(each, y, label_smoothing=self.label_smoothing) for each in (clean, corrupted))
        terms = {"natural": natural, "corrupted": other}
        if self._aligned:
            terms["alignment"] = alignment(taps.blocks[name] for name in self._aligned)
        total = natural + self.weight * terms["alignment"] if self.minimize == "alignment" else (natural + other) / 2
        if keep is not None and used is not None and keep is not used:
            maximized = other if self.maximize == "cross-entropy" else self.weight * terms["alignment"]
            check_gradient(maximized, "objective rspc")
            (slope,) = torch.autograd.grad(maximized, used, retain_graph=True)
            total = (
                total + (slope * (keep - used.detach())).sum()
            )  # adds 0, but gives the corruption model its gradient
        return Losses(total, corrupted, terms, clean)


def _resized(model: nn.Module, x: Tensor) -> Tensor:
    return model.resized(x) if isinstance(model, Classifier) else x


def alignment(outputs: Iterable[Tensor]) -> Tensor:
    """L_align of Eq. 2, from block outputs for a batch of clean images followed by the occluded ones."""
    halves = (output.to(torch.promote_types(output.dtype, torch.float32)).chunk(2) for output in outputs)
    return torch.stack([F.mse_loss(clean, corrupted) for clean, corrupted in halves]).mean()


def default_patch_size(outputs: Sequence[Sequence[int]], shape: Sequence[int]) -> int:
    """The patch size in pixels that tiles the image and is nearest to the size of the model's tokens.

    Tokens are those of the first attention block with at most `MOST_PATCHES` of them, given the shapes of the blocks'
    outputs: a ViT's own patches, and patches of 16 pixels for Swin at 224.
    """
    _, height, width = shape
    grids = [_grid(output, height, width) for output in outputs]
    rows, _ = next((grid for grid in grids if math.prod(grid) <= MOST_PATCHES), grids[-1])
    side = math.gcd(height, width)
    tiles = [size for size in range(side, 0, -1) if side % size == 0]
    return min(tiles, key=lambda size: abs(math.log(size * rows / height)))


def _grid(output: Sequence[int], height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the tokens in an output of (tokens, channels), (channels, H, W) or (H, W, channels)."""
    if len(output) == 2:
        return token_grid(output[0], height, width)
    first, second, third = output
    return (second, third) if second * width == third * height else (first, second)


def _attention_outputs(model: nn.Module, shape: Sequence[int]) -> dict[str, Tensor]:
    """The output of each block with self-attention, for two images of this shape."""
    if not isinstance(model, Tapped):
        return {}
    weights = next(model.parameters())
    with torch.no_grad(), in_mode(model, training=False), model.tap("blocks") as taps:
        model(torch.zeros(2, *shape, device=weights.device, dtype=weights.dtype))
    found = {block.name: taps.blocks[block.name] for block in model.blocks() if block.attends}
    for name, output in found.items():
        if len(output) != 2 or output.ndim not in (3, 4):
            raise ValueError(f"rspc cannot align the outputs of block {name}: of two images they are {output.shape}")
    return found

"""RSPC (Guo et al. 2023): align features of clean images and of images with the most sensitive patches occluded."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bastion import rng
from bastion.errors import shown
from bastion.forward import check_gradient
from bastion.models.classifier import Classifier
from bastion.models.corruption_model import CorruptionModel, keep_mask
from bastion.patches import Grid, attention_outputs, default_patch_size
from bastion.settings import AtLeastOne, NotNegative, Positive, SettingsError, Share, Smoothing, settings
from bastion.training.objectives import objectives
from bastion.types import Batch, Losses, Objective, Prepared, Tapped, Taps, TrainingContext

Term = Literal["alignment", "cross-entropy"]


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
        without_effect = {
            "maximize": (self.patches == "random", "random patches maximize nothing"),
            "corruption_lr": (self.patches == "random", "random patches need no corruption model"),
            "grad_scale": (self.patches == "random", "random patches need no corruption model"),
            "weight": ("alignment" not in self._terms, "weighs the alignment, which nothing takes here"),
        }
        for key, (unused, why) in without_effect.items():
            usual = getattr(type(self), key)
            if unused and getattr(self, key) != usual:
                raise SettingsError("rspc", (key,), f"{why}; leave it out, or at its default, {shown(usual)}")

    @property
    def _terms(self) -> set[Term]:
        """What the model and the corruption model take the gradient of."""
        return {self.minimize} if self.patches == "random" else {self.minimize, self.maximize or self.minimize}

    def setup(self, context: TrainingContext) -> None:
        model = context.model
        _, *shape = _resized(model, torch.zeros(1, *context.data.shape)).shape
        aligns = "alignment" in self._terms
        outputs = attention_outputs(model, shape) if aligns or self.patch_size is None else {}
        if not outputs and (aligns or self.patch_size is None):
            raise ValueError(
                "rspc aligns the outputs of self-attention blocks, and this model has none; take another model, or set "
                "minimize: cross-entropy and a patch_size"
            )
        self._aligned = list(outputs) if aligns else []
        size = self.patch_size or default_patch_size([output.shape[1:] for output in outputs.values()], shape)
        self._grid = Grid.tiling(shape, size)
        if self.patches == "random":
            return
        corruption_model = CorruptionModel(shape, size)
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
        x, y = prepared.clean.x, prepared.clean.y
        mask = differentiable_mask = self._learned_mask(x)
        if mask is not None and self.maximize not in (None, self.minimize):
            differentiable_mask = mask.detach().requires_grad_()  # keeps the model's loss from the corruption model
        occluded = prepared.x if differentiable_mask is None else _occlude(x, prepared.x, differentiable_mask)
        with cast(Tapped, model).tap("blocks") if self._aligned else nullcontext(Taps()) as taps:
            clean, corrupted = model(torch.cat([x, occluded])).chunk(2)
        natural, corrupted_loss = (
            F.cross_entropy(logits, y, label_smoothing=self.label_smoothing) for logits in (clean, corrupted)
        )
        terms = {"natural": natural, "corrupted": corrupted_loss}
        if self._aligned:
            terms["alignment"] = alignment(taps.blocks[name] for name in self._aligned)
        if self.minimize == "alignment":
            total = natural + self.weight * terms["alignment"]
        else:
            total = (natural + corrupted_loss) / 2
        if mask is not None and differentiable_mask is not None and differentiable_mask is not mask:
            maximized = corrupted_loss if self.maximize == "cross-entropy" else self.weight * terms["alignment"]
            total = total + _gradient_only(maximized, differentiable_mask, mask)
        return Losses(total, corrupted, terms, clean)

    def _learned_mask(self, x: Tensor) -> Tensor | None:
        """(B, 1, H, W), 0 on the patches to occlude; None if patches are random, which `prepare` has occluded."""
        if self.networks is None:
            return None
        processes = dist.get_world_size() if dist.is_initialized() else 1
        count = self._grid.share(self.rho)
        return keep_mask(self.networks(x), self._grid, count, grad_scale=self.grad_scale, processes=processes)


def _occlude(x: Tensor, fill: Tensor, mask: Tensor) -> Tensor:
    """Eq. 1."""
    return mask * x + (1 - mask) * fill


def _gradient_only(maximized: Tensor, differentiable_mask: Tensor, mask: Tensor) -> Tensor:
    """0, whose gradient by the mask is that of `maximized` by its detached copy."""
    check_gradient(maximized, "objective rspc")
    (slope,) = torch.autograd.grad(maximized, differentiable_mask, retain_graph=True)
    return (slope * (mask - differentiable_mask.detach())).sum()


def _resized(model: nn.Module, x: Tensor) -> Tensor:
    return model.resized(x) if isinstance(model, Classifier) else x


def alignment(outputs: Iterable[Tensor]) -> Tensor:
    """L_align of Eq. 2, from block outputs for a batch of clean images followed by the occluded ones."""
    halves = (output.to(torch.promote_types(output.dtype, torch.float32)).chunk(2) for output in outputs)
    return torch.stack([F.mse_loss(clean, corrupted) for clean, corrupted in halves]).mean()

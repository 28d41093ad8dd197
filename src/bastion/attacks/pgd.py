"""Projected gradient descent (Madry et al. 2018) and its one-step forms, FGSM and FGSM with random start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from bastion import rng
from bastion.attacks import attacks
from bastion.attacks.losses import LOSSES, Loss, LossName, misclassified
from bastion.attacks.threat import Threat
from bastion.errors import BastionError
from bastion.types import Batch


@attacks.register("pgd")
@dataclass(frozen=True, kw_only=True)
class PGD:
    """`steps` steps along the steepest direction of the threat's norm, each projected back into its set."""

    steps: int = 20
    step: float | None = None  # length of a step in pixel units …
    rel_step: float | None = None  # … or in units of eps; neither: 2.5 / steps of eps
    restarts: int = 1
    random_start: bool = True
    loss: LossName = "ce"
    sparsity: float = 0.01  # l1 only: the share of coordinates that a step moves
    keep: Literal["best", "last"] = "best"  # "last" saves a forward pass, for training

    def __post_init__(self) -> None:
        if self.steps < 0 or self.restarts < 1:
            raise BastionError(f"pgd: need steps >= 0 and restarts >= 1, got {self.steps} and {self.restarts}")
        if self.keep == "last" and self.restarts > 1:
            raise BastionError(f"pgd: keep=last returns one run's last point, so it takes no {self.restarts} restarts")
        if any(length is not None and not length > 0 for length in (self.step, self.rel_step)):
            raise BastionError(f"pgd: a step must be longer than 0, got step={self.step}, rel_step={self.rel_step}")
        if self.step is not None and self.rel_step is not None:
            raise BastionError("pgd: give `step` (pixel units) or `rel_step` (units of eps), not both")
        if not 0 < self.sparsity <= 1:
            raise BastionError(f"pgd: sparsity is a share of the coordinates in (0, 1], got {self.sparsity}")

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        x0 = batch.check(getattr(model, "num_classes", None), "pgd").x.detach()
        best = Incumbent(x0)
        if self.keep == "best" and (self.random_start or self.steps == 0):
            best.offer(x0, *evaluate(model, x0, batch.y, LOSSES[self.loss]))
        for restart in range(self.restarts):
            x = self._start(batch.index, x0, threat, seed, restart)
            for _ in range(self.steps):
                loss, fooled, gradient = ascent(model, x, batch.y, LOSSES[self.loss])
                best.offer(x, loss, fooled)
                x = threat.project(x0, x + self._length(threat) * threat.direction(gradient, x, self.sparsity))
            if self.keep == "last":
                return x
            best.offer(x, *evaluate(model, x, batch.y, LOSSES[self.loss]))
        return best.x

    def _start(self, index: Tensor, x0: Tensor, threat: Threat, seed: int, restart: int) -> Tensor:
        if not self.random_start:
            return x0
        return threat.project(x0, threat.random_point(x0, index, seed=seed, draw=rng.key("pgd", restart)))

    def _length(self, threat: Threat) -> float:
        if self.step is not None:
            return self.step
        return threat.eps * (self.rel_step if self.rel_step is not None else 2.5 / max(self.steps, 1))


@attacks.register("fgsm")
def fgsm(*, loss: LossName = "ce", sparsity: float = 0.01, keep: Literal["best", "last"] = "best") -> PGD:
    """One step of length eps from the clean image (Goodfellow et al. 2015)."""
    return PGD(steps=1, rel_step=1.0, random_start=False, loss=loss, sparsity=sparsity, keep=keep)


@attacks.register("fgsm-rs")
def fgsm_rs(
    *,
    rel_step: float = 1.25,
    loss: LossName = "ce",
    sparsity: float = 0.01,
    keep: Literal["best", "last"] = "best",
) -> PGD:
    """One step of length 1.25 eps from a random point of the ball (Wong et al. 2020)."""
    return PGD(steps=1, rel_step=rel_step, random_start=True, loss=loss, sparsity=sparsity, keep=keep)


class Incumbent:
    """The best point of each example so far: a fooled one before any other, then the highest loss."""

    def __init__(self, x0: Tensor) -> None:
        self.x = x0
        self.loss = torch.full((len(x0),), -torch.inf, dtype=x0.dtype, device=x0.device)
        self.fooled = torch.zeros(len(x0), dtype=torch.bool, device=x0.device)

    def offer(self, x: Tensor, loss: Tensor, fooled: Tensor) -> None:
        better = (fooled & ~self.fooled) | ((fooled == self.fooled) & (loss > self.loss))
        better &= x.isfinite().flatten(1).all(1)  # a point that is none fools nobody
        self.x = torch.where(better[:, None, None, None], x, self.x)
        self.loss = torch.where(better, loss, self.loss)
        self.fooled = self.fooled | (fooled & better)


def evaluate(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Loss and fooled flag of each example, without a gradient."""
    with torch.no_grad():
        logits = model(x)
        return loss(logits, y), misclassified(logits, y)


def ascent(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, fooled flag and input gradient of each example; parameters collect no gradient."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        logits = model(x)
        values = loss(logits, y)
        (gradient,) = torch.autograd.grad(values.sum(), x)
    # A coordinate without a gradient must not stop the others: that would look like robustness.
    gradient = gradient.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return values.detach(), misclassified(logits.detach(), y), gradient

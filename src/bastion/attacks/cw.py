"""Carlini and Wagner's l2 attack (2017): the nearest point that fools, by Adam on tanh of the pixels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bastion.attacks import attacks
from bastion.attacks.engine import Jobs, Run, Search, attack, opening
from bastion.attacks.losses import margin
from bastion.attacks.threat import Threat
from bastion.errors import BastionError
from bastion.registry import check_fields
from bastion.types import Batch

BETAS, TINY = (0.9, 0.999), 1e-8  # Adam's
NEARLY = 0.999999  # tanh never reaches the faces of the box, where its slope is zero


@attacks.register("cw")
@dataclass(frozen=True, kw_only=True)
class CW:
    """Carlini and Wagner's l2 attack (2017): the nearest point that fools, by Adam.

    Minimises ‖x - x0‖² + c·max(z_y - max z_other, -kappa), without a search over c; the nearest hit is returned.
    A hit outside the threat's set does not count. Distances are the threat's own; what is minimised is l2.
    """

    c: float = 1.0
    kappa: float = 0.0
    lr: float = 0.01
    steps: int = 100

    def __post_init__(self) -> None:
        check_fields(self, "cw")
        if min(self.c, self.lr) <= 0 or min(self.kappa, self.steps) < 0:
            raise BastionError(
                f"cw: need c and lr above 0, kappa and steps >= 0, got {self.c}, {self.lr}, {self.kappa}, {self.steps}"
            )

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        return attack(model, batch, threat, lambda classes: AdamSteps(self), name="cw", goal="nearest")


@dataclass
class Descent(Run):
    w: Tensor  # x = (tanh w + 1) / 2
    first: Tensor  # Adam's running mean of the gradient …
    second: Tensor  # … and of its square


class AdamSteps(Search[Descent]):
    def __init__(self, settings: CW) -> None:
        self.settings = settings

    def start(self, jobs: Jobs, batch: Batch) -> Descent:
        w = torch.atanh((2 * batch.x - 1) * NEARLY)
        zero = torch.zeros_like(w)
        runs = Descent(**opening(jobs, batch, batch.x.clone()), w=w, first=zero, second=zero.clone())
        runs.done |= self.settings.steps == 0
        return runs

    def wants_gradient(self, runs: Descent) -> Tensor:
        return runs.step < self.settings.steps - 1

    def loss(self, runs: Descent, logits: Tensor) -> Tensor:
        return margin(logits, runs.y).clamp(max=self.settings.kappa)

    def tell(self, runs: Descent, logits: Tensor, gradient: Tensor) -> None:
        slope = (1 - runs.w.tanh().square()) / 2
        downhill = (2 * (runs.x - runs.x0) - self.settings.c * gradient) * slope
        runs.step = runs.step + 1
        count = runs.step.view(-1, 1, 1, 1).to(downhill.dtype)
        runs.first = BETAS[0] * runs.first + (1 - BETAS[0]) * downhill
        runs.second = BETAS[1] * runs.second + (1 - BETAS[1]) * downhill.square()
        mean, square = runs.first / (1 - BETAS[0] ** count), runs.second / (1 - BETAS[1] ** count)
        runs.w = runs.w - self.settings.lr * mean / (square.sqrt() + TINY)
        runs.x = (runs.w.tanh() + 1) / 2
        runs.done = runs.step >= self.settings.steps

"""DeepFool (Moosavi-Dezfooli et al. 2016): straight to the nearest linearised boundary until the class changes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from bastion.attacks import attacks
from bastion.attacks.engine import Jobs, Run, Search, attack, opening
from bastion.attacks.hyperplane import nearest_boundary, to_hyperplane
from bastion.attacks.losses import misclassified, targeted_margin
from bastion.attacks.threat import Norm, Threat
from bastion.errors import BastionError
from bastion.registry import check_fields
from bastion.types import Batch


@attacks.register("deepfool")
@dataclass(frozen=True, kw_only=True)
class DeepFool:
    """DeepFool (Moosavi-Dezfooli et al. 2016): straight to the nearest linearised boundary, until the class changes.

    Steps are in the threat's norm, inside the box. A fooling point outside the threat's set does not count.
    """

    steps: int = 50
    overshoot: float = 0.02
    classes: int = 10  # boundaries to so many of the likeliest wrong classes are looked at; a gradient for each

    def __post_init__(self) -> None:
        check_fields(self, "deepfool")
        if self.steps < 0 or self.overshoot <= 0 or self.classes < 1:
            raise BastionError(
                "deepfool: need steps >= 0, overshoot above 0 and classes >= 1, got "
                f"{self.steps}, {self.overshoot} and {self.classes}"
            )

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        return attack(model, batch, threat, lambda classes: StraightSteps(self, threat.norm, classes), name="deepfool")


class StraightSteps(Search[Run]):
    def __init__(self, settings: DeepFool, norm: Norm, classes: int) -> None:
        self.settings, self.norm = settings, norm
        self.backwards = min(settings.classes, classes - 1)

    def start(self, jobs: Jobs, batch: Batch) -> Run:
        return Run(**opening(jobs, batch, batch.x.clone()))

    def wants_gradient(self, runs: Run) -> Tensor:
        return runs.step < self.settings.steps

    def loss(self, runs: Run, logits: Tensor) -> Tensor:
        return targeted_margin(logits, runs.y, runs.target)

    def gradient(self, runs: Run, logits: Tensor, x: Tensor) -> Tensor:
        runs.target, normal = nearest_boundary(self.norm, logits, runs.y, x, self.backwards)
        return normal

    def tell(self, runs: Run, logits: Tensor, gradient: Tensor) -> None:
        runs.done = (runs.step >= self.settings.steps) | misclassified(logits, runs.y)
        if runs.done.all():
            return
        x, normal = runs.x.flatten(1), gradient.flatten(1)
        move = to_hyperplane(self.norm, x, normal, (normal * x).sum(1) - self.loss(runs, logits))
        runs.x = (x + (1 + self.settings.overshoot) * move).clamp(0, 1).view(runs.x.shape)
        runs.step = runs.step + 1

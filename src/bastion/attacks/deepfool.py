"""DeepFool (Moosavi-Dezfooli et al. 2016): steps to the nearest linearised decision boundary."""

from __future__ import annotations

from torch import Tensor, nn

from bastion.attacks import attacks
from bastion.attacks.engine import Jobs, Search, SearchState, attack, initial_state
from bastion.attacks.hyperplane import nearest_boundary, to_hyperplane
from bastion.attacks.losses import targeted_margin
from bastion.forward import misclassified
from bastion.settings import AtLeastOne, Count, Positive, settings
from bastion.threat import Norm, Threat
from bastion.types import Attack, Batch


@attacks.register("deepfool")
@settings
class DeepFool(Attack):
    """DeepFool (Moosavi-Dezfooli et al. 2016): steps to the nearest linearised boundary until the class changes.

    Steps are the shortest in the threat's norm, inside [0, 1]. Only results inside the threat's set count.
    """

    steps: Count = 50  # at most
    overshoot: Positive = 0.02  # how far past the boundary a step goes, as a share of it
    classes: AtLeastOne = 10  # boundaries to this many of the likeliest wrong classes are compared, a gradient for each

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        return attack(model, batch, threat, lambda classes: StraightSteps(self, threat.norm, classes), name="deepfool")

    def passes(self, norm: Norm) -> int:
        return self.steps + 1


class StraightSteps(Search[SearchState]):
    def __init__(self, settings: DeepFool, norm: Norm, classes: int) -> None:
        self.settings, self.norm = settings, norm
        self.backwards = min(settings.classes, classes - 1)

    def start(self, jobs: Jobs, batch: Batch) -> SearchState:
        return SearchState(**initial_state(jobs, batch, batch.x.clone()))

    def wants_gradient(self, state: SearchState) -> Tensor:
        return state.step < self.settings.steps

    def loss(self, state: SearchState, logits: Tensor) -> Tensor:
        return targeted_margin(logits, state.y, state.target)

    def gradient(self, state: SearchState, logits: Tensor, x: Tensor) -> Tensor:
        state.target, normal = nearest_boundary(self.norm, logits, state.y, x, self.backwards)
        return normal

    def update(self, state: SearchState, logits: Tensor, gradient: Tensor) -> None:
        state.done = (state.step >= self.settings.steps) | misclassified(logits, state.y)
        if state.done.all():
            return
        x, normal = state.x.flatten(1), gradient.flatten(1)
        move = to_hyperplane(self.norm, x, normal, (normal * x).sum(1) - self.loss(state, logits))
        state.x = (x + (1 + self.settings.overshoot) * move).clamp(0, 1).view(state.x.shape)
        state.step = state.step + 1

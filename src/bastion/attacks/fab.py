"""FAB (Croce and Hein 2020): the nearest adversarial example, by steps to the linearised decision boundary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt, Lt
from torch import Tensor, nn

from bastion import rng
from bastion.attacks import attacks
from bastion.attacks.engine import Jobs, Search, SearchState, attack, initial_state
from bastion.attacks.hyperplane import nearest_boundary, to_hyperplane
from bastion.attacks.losses import targeted_margin
from bastion.forward import misclassified
from bastion.settings import AtLeastOne, Count, settings
from bastion.threat import Norm, Threat, length
from bastion.types import Attack, Batch

PULL = 0.1  # largest weight of the step from the image itself (α_max)


@attacks.register("fab")
@settings
class FAB(Attack):
    """FAB (Croce and Hein 2020): the nearest adversarial example, by steps to the linearised boundary.

    `targets` 0: untargeted, with a gradient for each class; n: one search for each of the n likeliest wrong classes.
    `keep` "fooled" stops at the first adversarial example; "nearest" uses all steps to reduce the distance.
    """

    steps: Count = 100  # of a search
    targets: Count = 0  # 0: towards the nearest of all classes; n: towards each of the n likeliest wrong ones
    restarts: AtLeastOne = 1  # searches, each from another random point
    overshoot: Annotated[float, Gt(1)] = 1.05  # η: how far past the boundary a step goes
    backward: Annotated[float, Gt(0), Lt(1)] = 0.9  # β: share of its distance that an adversarial example keeps
    keep: Literal["fooled", "nearest"] = "fooled"  # stop at the first success, or use all steps to reduce the distance

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        return attack(
            model,
            batch,
            threat,
            lambda classes: BoundarySteps(self, threat, seed, classes),
            name="fab",
            targets=self.targets,
            restarts=self.restarts,
            goal="hit" if self.keep == "fooled" else "nearest",
        )

    def passes(self, norm: Norm) -> int:
        """An x that is adversarial, but not inside the threat's set, takes a second pass, moved towards the image."""
        return self.restarts * max(self.targets, 1) * (2 * self.steps + 1)

    def short_name(self) -> tuple[str, dict[str, Any]]:
        return ("fab-t", {"targets": 9}) if self.targets else ("fab", {})


@attacks.register("fab-t")
def fab_t(*, steps: int = 100, targets: int = 9, restarts: int = 1) -> FAB:
    """FAB with a search for each of the likeliest wrong classes, so that a step takes one gradient."""
    return FAB(steps=steps, targets=targets, restarts=restarts)


@dataclass
class FABState(SearchState):
    tested: Tensor  # bool (B,): x is the result of a step, so it may be adversarial
    last_fooled: Tensor  # bool (B,): the result of the last step was adversarial


class BoundarySteps(Search[FABState]):
    """If the last step's result was adversarial, the next one is expected to be too, and is run without a gradient.

    An x that is not adversarial is where the next step starts, and needs its gradient; an adversarial one is first
    moved back towards the image, so its gradient would not be used.
    """

    mixed = True

    def __init__(self, settings: FAB, threat: Threat, seed: int, classes: int) -> None:
        self.settings, self.threat, self.seed = settings, threat, seed
        self.backwards = 1 if settings.targets else classes - 1

    def start(self, jobs: Jobs, batch: Batch) -> FABState:
        x = torch.where((jobs.restart > 0).view(-1, 1, 1, 1), self._nearby(jobs, batch), batch.x)
        no = torch.zeros_like(jobs.at, dtype=torch.bool)
        return FABState(**initial_state(jobs, batch, x), tested=no, last_fooled=no.clone())

    def _nearby(self, jobs: Jobs, batch: Batch) -> Tensor:
        """Random images at half the radius, where restarts begin."""
        draw = rng.key("fab") + jobs.number
        if self.threat.norm == "linf":
            offset = rng.uniform(self.seed, batch.index, draw, batch.x.shape[1:], -1, 1, dtype=batch.x.dtype)
        else:
            offset = rng.normal(self.seed, batch.index, draw, batch.x.shape[1:], dtype=batch.x.dtype)
        unit = offset / length(self.threat.norm, offset).view(-1, 1, 1, 1)
        return (batch.x + self.threat.eps / 2 * unit).clamp(0, 1)

    def wants_gradient(self, state: FABState) -> Tensor:
        return (state.step < self.settings.steps) & ~(state.tested & state.last_fooled)

    def loss(self, state: FABState, logits: Tensor) -> Tensor:
        return targeted_margin(logits, state.y, state.target)

    def gradient(self, state: FABState, logits: Tensor, x: Tensor) -> Tensor:
        if self.settings.targets:
            return super().gradient(state, logits, x)
        state.target, normal = nearest_boundary(self.threat.norm, logits, state.y, x, self.backwards)
        return normal

    def update(self, state: FABState, logits: Tensor, gradient: Tensor) -> None:
        settings = self.settings
        fooled = state.tested & misclassified(logits, state.y)
        had_gradient = self.wants_gradient(state)
        state.done = state.step >= settings.steps
        state.last_fooled = torch.where(state.tested, fooled, state.last_fooled)
        steps = had_gradient & ~fooled & ~state.done
        back = state.x0 + settings.backward * (state.x - state.x0)
        x = torch.where(fooled.view(-1, 1, 1, 1), back, state.x)
        if steps.any():
            x[steps] = self._step(state.take(steps), logits[steps], gradient[steps])
        state.x, state.tested, state.step = x, steps, state.step + steps.long()

    def _step(self, state: FABState, logits: Tensor, gradient: Tensor) -> Tensor:
        x, x0 = state.x.flatten(1), state.x0.flatten(1)
        normal = gradient.flatten(1)
        offset = (normal * x).sum(1) - self.loss(state, logits)
        moves = to_hyperplane(
            self.threat.norm, torch.cat([x, x0]), torch.cat([normal, normal]), torch.cat([offset, offset])
        )
        here, there = moves.chunk(2)
        near, far = (length(self.threat.norm, move).clamp(min=1e-8) for move in (here, there))
        pull = (near / (near + far)).clamp(max=PULL)[:, None]
        eta = self.settings.overshoot
        return ((1 - pull) * (x + eta * here) + pull * (x0 + eta * there)).clamp(0, 1).view(state.x.shape)

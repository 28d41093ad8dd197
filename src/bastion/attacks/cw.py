"""Carlini and Wagner's l2 attack (2017): the nearest adversarial example, by Adam on tanh of the pixels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bastion.attacks import attacks
from bastion.attacks.engine import Jobs, Search, SearchState, attack, initial_state
from bastion.attacks.losses import margin
from bastion.settings import Count, NotNegative, Positive, settings
from bastion.threat import Norm, Threat
from bastion.types import Attack, Batch

BETAS, ADAM_EPS = (0.9, 0.999), 1e-8  # Adam's
NEARLY = 0.999999  # pixels are moved off 0 and 1, where atanh is infinite and the slope of tanh zero


@attacks.register("cw")
@settings
class CW(Attack):
    """Carlini and Wagner's l2 attack (2017): the nearest adversarial example, by Adam.

    Minimises ‖x - x0‖² + c·max(z_y - max z_other, -kappa) for one c; the nearest adversarial example is returned.
    Only those inside the threat's set count, and the nearest is by the threat's norm, though l2 is minimised.
    """

    c: Positive = 1.0  # weight of the margin beside the distance
    kappa: NotNegative = 0.0  # margin by which an adversarial example is to be wrong
    lr: Positive = 0.01  # Adam's
    steps: Count = 100  # Adam's

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        return attack(model, batch, threat, lambda classes: AdamSteps(self), name="cw", goal="nearest")

    def passes(self, norm: Norm) -> int:
        return max(self.steps, 1)


@dataclass
class CWState(SearchState):
    w: Tensor  # x = (tanh w + 1) / 2
    first: Tensor  # Adam's running mean of the gradient …
    second: Tensor  # … and of its square


class AdamSteps(Search[CWState]):
    def __init__(self, settings: CW) -> None:
        self.settings = settings

    def start(self, jobs: Jobs, batch: Batch) -> CWState:
        w = torch.atanh((2 * batch.x - 1) * NEARLY)
        zero = torch.zeros_like(w)
        state = CWState(**initial_state(jobs, batch, batch.x.clone()), w=w, first=zero, second=zero.clone())
        state.done |= self.settings.steps == 0
        return state

    def wants_gradient(self, state: CWState) -> Tensor:
        return state.step < self.settings.steps - 1

    def loss(self, state: CWState, logits: Tensor) -> Tensor:
        return margin(logits, state.y).clamp(max=self.settings.kappa)

    def update(self, state: CWState, logits: Tensor, gradient: Tensor) -> None:
        slope = (1 - state.w.tanh().square()) / 2
        downhill = (2 * (state.x - state.x0) - self.settings.c * gradient) * slope
        state.step = state.step + 1
        count = state.step.view(-1, 1, 1, 1).to(downhill.dtype)
        state.first = BETAS[0] * state.first + (1 - BETAS[0]) * downhill
        state.second = BETAS[1] * state.second + (1 - BETAS[1]) * downhill.square()
        mean, square = state.first / (1 - BETAS[0] ** count), state.second / (1 - BETAS[1] ** count)
        state.w = state.w - self.settings.lr * mean / (square.sqrt() + ADAM_EPS)
        state.x = (state.w.tanh() + 1) / 2
        state.done = state.step >= self.settings.steps

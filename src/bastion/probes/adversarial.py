"""Does the classification survive an attack?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bastion.attacks import Attack, Threat
from bastion.attacks.judge import judge
from bastion.probes import probes
from bastion.types import Batch


@probes.register("adversarial")
@dataclass(frozen=True)
class Adversarial:
    """Robust accuracy: `correct` where no point that the attack returned is both inside the threat and misclassified.

    A clean mistake counts as fooled and is not attacked. `distance` is that of the fooling point, NaN for survivors.
    """

    threat: Threat
    attack: Attack

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        verdict = judge(model, batch, self.attack, self.threat, seed=seed)
        distance = self.threat.distance(batch.x, verdict.x)
        return {
            "correct": verdict.clean & ~verdict.fooled,
            "in_budget": verdict.inside,
            "distance": torch.where(verdict.fooled, distance, torch.nan).float(),
            "prediction": verdict.prediction,
            "clean": batch.x,
            "adversarial": verdict.x,
        }

"""Distance to the nearest adversarial example."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from bastion import journal
from bastion.attacks import Attack, Threat
from bastion.attacks.judge import judge
from bastion.attacks.minimal import Minimal
from bastion.probes import probes
from bastion.probes.adversarial import describe_attack
from bastion.settings import settings
from bastion.threat import Norm
from bastion.types import Batch, Description, Fact, Probe


@probes.register("distortion")
@settings(kw_only=False)
class Distortion(Probe):
    """Distance to the nearest adversarial example found: 0 for misclassified clean images, inf if none was found.

    For every radius, the share of examples with a larger distance is an upper bound of the robust accuracy.
    """

    norm: Norm
    attack: Attack = field(default_factory=Minimal)

    role = "attack"
    makes_pictures = True
    facts: ClassVar[Mapping[str, str | Fact]] = {
        "distance": Fact(
            "to the nearest adversarial example found: 0 for misclassified clean images, inf if none was found",
            "distance",
        ),
        "prediction": "on that example",
        "before": "the prediction on the clean image",
        **journal.PASSES,
    }

    def describe(self) -> Description:
        return replace(describe_attack(self.attack, Threat(self.norm, 0.0)), threat=None)

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        size = math.prod(batch.x.shape[1:])
        box = Threat(self.norm, {"linf": 1.0, "l2": math.sqrt(size), "l1": float(size)}[self.norm])
        with journal.opened() as notes:
            verdict = judge(model, batch, self.attack, box, seed=seed)
        distance = torch.where(verdict.fooled, box.distance(batch.x, verdict.x), torch.inf)
        return {
            "distance": torch.where(verdict.clean, distance, 0).float(),
            "prediction": verdict.prediction,
            "before": verdict.before,
            **notes.columns(batch.index, verdict.fooled, verdict.inside),
            "clean": batch.x,
            "adversarial": verdict.x,
        }

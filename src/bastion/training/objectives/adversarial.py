"""Adversarial training (Madry et al. 2018): cross-entropy on attacked images."""

from __future__ import annotations

from torch import nn

from bastion.settings import settings
from bastion.training.objectives import objectives
from bastion.training.objectives.attacked import Attacked
from bastion.training.objectives.standard import cross_entropy
from bastion.types import Losses, Prepared


@objectives.register("adversarial")
@settings(frozen=False, eq=False)
class Adversarial(Attacked):
    """Cross-entropy on attacked images (adversarial training)."""

    def loss(self, model: nn.Module, prepared: Prepared) -> Losses:
        return cross_entropy(model, prepared, self.label_smoothing)

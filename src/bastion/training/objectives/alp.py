"""Adversarial logit pairing (Kannan et al. 2018): equal logits on clean and attacked images."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from bastion.settings import NotNegative, settings
from bastion.training.objectives import objectives
from bastion.training.objectives.attacked import Attacked
from bastion.types import Losses, Prepared


@objectives.register("alp")
@settings(frozen=False, eq=False)
class LogitPairing(Attacked):
    """½ CE(x) + ½ CE(x') + weight · mean (z(x) - z(x'))², the mean over images and classes."""

    weight: NotNegative = 0.5

    def loss(self, model: nn.Module, prepared: Prepared) -> Losses:
        clean, attacked = model(prepared.clean.x), model(prepared.x)
        natural, adversarial = (
            F.cross_entropy(logits, prepared.clean.y, label_smoothing=self.label_smoothing)
            for logits in (clean, attacked)
        )
        pairing = F.mse_loss(clean, attacked)
        total = (natural + adversarial) / 2 + self.weight * pairing
        return Losses(total, attacked, {"natural": natural, "pairing": pairing}, clean)

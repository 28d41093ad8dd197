"""TRADES (Zhang et al. 2019): right on the images, and the same answer around them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from bastion.attacks.losses import divergence
from bastion.settings import NotNegative, settings
from bastion.training.objectives import objectives
from bastion.training.objectives.attacked import Attacked
from bastion.types import Losses, Prepared


@objectives.register("trades")
@settings(frozen=False, eq=False)
class Trades(Attacked):
    """CE(x) + β · KL(p(x) ‖ p(x')). The attack is PGD on that divergence: `attack: {name: pgd, loss: kl, …}`."""

    beta: NotNegative = 6.0

    def loss(self, model: nn.Module, prepared: Prepared) -> Losses:
        clean, attacked = model(prepared.clean.x), model(prepared.x)
        natural = F.cross_entropy(clean, prepared.clean.y, label_smoothing=self.label_smoothing)
        apart = divergence(clean.log_softmax(1), attacked).mean()
        return Losses(natural + self.beta * apart, attacked, {"natural": natural, "divergence": apart}, clean)

"""TRADES (Zhang et al. 2019): cross-entropy on clean images, and the divergence of predictions under attack."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from bastion.attacks import Attack, Threat
from bastion.attacks.losses import divergence
from bastion.attacks.pgd import PGD
from bastion.settings import NotNegative, SettingsError, settings
from bastion.training.objectives import objectives
from bastion.training.objectives.attacked import Attacked
from bastion.types import Losses, Prepared

# The authors' settings for CIFAR-10: ten steps of 2/255.
THREAT = Threat("linf", 8 / 255)
ATTACK = PGD(steps=10, rel_step=0.25, loss="kl", keep="last")


@objectives.register("trades")
@settings(frozen=False, eq=False)
class Trades(Attacked):
    """CE(x) + β · KL(p(x) ‖ p(x')), where x' maximises the divergence."""

    threat: Threat = THREAT
    attack: Attack = ATTACK
    beta: NotNegative = 6.0  # weight of the divergence

    def __post_init__(self) -> None:
        loss = getattr(self.attack, "loss", "kl")  # a user's own attack may have no such setting
        if loss != "kl":
            raise SettingsError(
                "trades", ("attack", "loss"), f"must be kl, the divergence that is minimised, got {loss}"
            )

    def loss(self, model: nn.Module, prepared: Prepared) -> Losses:
        clean, attacked = model(prepared.clean.x), model(prepared.x)
        natural = F.cross_entropy(clean, prepared.clean.y, label_smoothing=self.label_smoothing)
        apart = divergence(clean.log_softmax(1), attacked).mean()
        return Losses(natural + self.beta * apart, attacked, {"natural": natural, "divergence": apart}, clean)

"""Base class of objectives with an attack as the inner maximisation."""

from __future__ import annotations

from typing import Literal

from torch import nn

from bastion.acceleration import for_training
from bastion.forward import in_mode
from bastion.settings import NotNegative, Smoothing, settings
from bastion.threat import Threat
from bastion.types import Attack, Batch, Objective, Prepared


@settings(frozen=False, eq=False)
class Attacked(Objective):
    """Trains on attacked images.

    `eps_warmup`: the radius grows linearly from 0 over this many epochs (Debenedetti et al. 2023).
    """

    threat: Threat  # trained against
    attack: Attack  # the inner maximisation
    eps_warmup: NotNegative = 0.0  # epochs over which the radius grows from 0
    attack_mode: Literal["eval", "train"] = "eval"  # of the model, while it is attacked
    label_smoothing: Smoothing = 0.0  # of the cross-entropy

    def prepare(self, model: nn.Module, batch: Batch, *, progress: float, seed: int) -> Prepared:
        threat = self.threat.scaled(min(1.0, progress / self.eps_warmup) if self.eps_warmup else 1.0)
        if threat.eps == 0:
            return Prepared(batch, batch.x, {"eps": 0.0})
        with in_mode(model, training=self.attack_mode == "train"), for_training(model) as attacked:
            x = self.attack(attacked, batch, threat, seed=seed)
        return Prepared(batch, x, {"eps": threat.eps})

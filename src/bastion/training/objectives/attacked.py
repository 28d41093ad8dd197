"""What objectives against an attack have in common: the inner maximisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from bastion.acceleration import for_training
from bastion.forward import in_mode
from bastion.threat import Threat
from bastion.types import Attack, Batch, Objective, Prepared


@dataclass(kw_only=True)
class Attacked(Objective):
    """Learns from what an attack makes of the images.

    `eps_warmup`: the radius grows linearly from 0 over so many epochs (Debenedetti et al. 2023).
    """

    threat: Threat
    attack: Attack
    eps_warmup: float = 0.0
    attack_mode: Literal["eval", "train"] = "eval"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.eps_warmup < 0:
            raise ValueError(f"eps_warmup counts epochs from 0 on, got {self.eps_warmup}")
        check_smoothing(self.label_smoothing)

    def prepare(self, model: nn.Module, batch: Batch, *, progress: float, seed: int) -> Prepared:
        threat = self.threat.scaled(min(1.0, progress / self.eps_warmup) if self.eps_warmup else 1.0)
        if threat.eps == 0:
            return Prepared(batch, batch.x, {"eps": 0.0})
        with in_mode(model, training=self.attack_mode == "train"), for_training(model) as attacked:
            x = self.attack(attacked, batch, threat, seed=seed)
        return Prepared(batch, x, {"eps": threat.eps})


def check_smoothing(value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), got {value}")

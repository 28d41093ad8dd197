"""Adversarial training (Madry et al. 2018): cross-entropy on what an attack makes of the images."""

from __future__ import annotations

from typing import Literal

from torch import nn

from bastion.attacks import Attack, Threat
from bastion.models.classifier import in_mode
from bastion.training.objectives import objectives
from bastion.training.objectives.standard import checked_smoothing, cross_entropy
from bastion.types import Batch, Example, Losses, Objective


@objectives.register("adversarial")
class Adversarial(Objective):
    """Cross-entropy on what an attack makes of the images.

    `eps_warmup`: the radius grows linearly from 0 over so many epochs (Debenedetti et al. 2023).
    """

    def __init__(
        self,
        *,
        threat: Threat,
        attack: Attack,
        eps_warmup: float = 0.0,
        attack_mode: Literal["eval", "train"] = "eval",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.threat, self.attack = threat, attack
        if eps_warmup < 0:
            raise ValueError(f"eps_warmup counts epochs from 0 on, got {eps_warmup}")
        self.eps_warmup, self.attack_mode = eps_warmup, attack_mode
        self.label_smoothing = checked_smoothing(label_smoothing)

    def prepare(self, model: nn.Module, batch: Batch, *, progress: float, seed: int) -> Example:
        threat = self.threat.scaled(min(1.0, progress / self.eps_warmup) if self.eps_warmup else 1.0)
        if threat.eps == 0:
            return Example(batch, batch.x, {"eps": 0.0})
        with in_mode(model, training=self.attack_mode == "train"):
            x = self.attack(model, batch, threat, seed=seed)
        return Example(batch, x, {"eps": threat.eps})

    def loss(self, model: nn.Module, example: Example) -> Losses:
        return cross_entropy(model, example, self.label_smoothing)

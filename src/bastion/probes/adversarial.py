"""Does the classification survive an attack? The attack proposes; success and budget are judged here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bastion.attacks import Attack, Threat
from bastion.attacks.losses import misclassified
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
        with torch.no_grad():
            alive = ~misclassified(model(batch.x), batch.y)
        x = batch.x.clone()
        if alive.any():
            x[alive] = self.attack(model, batch.select(alive), self.threat, seed=seed).to(x.dtype)
        inside = self.threat.contains(batch.x, x)
        with torch.no_grad():
            logits = model(x)
        fooled = alive & inside & misclassified(logits, batch.y)
        return {
            "correct": alive & ~fooled,
            "in_budget": inside,
            "distance": torch.where(fooled, self.threat.distance(batch.x, x), torch.nan).float(),
            "prediction": logits.argmax(1),
            "clean": batch.x,
            "adversarial": x,
        }

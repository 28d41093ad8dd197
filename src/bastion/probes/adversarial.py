"""Does the classification survive an attack?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bastion import journal
from bastion.attacks import Attack, Threat
from bastion.attacks.judge import judge
from bastion.probes import probes
from bastion.types import Batch


@probes.register("adversarial")
@dataclass(frozen=True)
class Adversarial:
    """Robust accuracy: `correct` where the attack returned no adversarial example: inside the threat and misclassified.

    A clean mistake counts as fooled and is not attacked. `distance` is that of the adversarial example, NaN for
    survivors. `before` is the prediction on the clean image, `fooled_by` the number of the ensemble's member that did
    it, -1 if none; `forwards` and `backwards` are the passes of the example that the attack counted.
    """

    threat: Threat
    attack: Attack

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        with journal.opened() as notes:
            verdict = judge(model, batch, self.attack, self.threat, seed=seed)
        distance = self.threat.distance(batch.x, verdict.x)
        return {
            "correct": verdict.clean & ~verdict.fooled,
            "in_budget": verdict.inside,
            "distance": torch.where(verdict.fooled, distance, torch.nan).float(),
            "prediction": verdict.prediction,
            "before": verdict.before,
            "fooled_by": _members(notes, batch.index, verdict.fooled),
            **notes.columns(batch.index, verdict.fooled, verdict.inside),
            "clean": batch.x,
            "adversarial": verdict.x,
        }


def _members(notes: journal.Journal, index: Tensor, fooled: Tensor) -> Tensor:
    numbers = torch.tensor([notes.fooled_by.get(each, -1) for each in index.tolist()])
    return torch.where(fooled.cpu(), numbers, -1)

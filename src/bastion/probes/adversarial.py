"""Does the classification survive an attack?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bastion.attacks import Attack, Threat, journal
from bastion.attacks.judge import judge
from bastion.probes import probes
from bastion.types import Batch


@probes.register("adversarial")
@dataclass(frozen=True)
class Adversarial:
    """Robust accuracy: `correct` where no point that the attack returned is both inside the threat and misclassified.

    A clean mistake counts as fooled and is not attacked. `distance` is that of the fooling point, NaN for survivors.
    `fooled_by` is the number of the ensemble's member that did it, -1 if none; `forwards` and `backwards` are the
    passes of the example that the attack counted.
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
            **_told(notes, batch.index, verdict.fooled),
            "clean": batch.x,
            "adversarial": verdict.x,
        }


# Doubts that an attack itself may raise, besides those of plug-ins; `measuring/sanity.py` has their texts.
NOTICES = ("few-classes", "square-beats-white-box", "blind-start")


def _told(notes: journal.Journal, index: Tensor, fooled: Tensor) -> dict[str, Tensor]:
    """The journal, example by example."""
    examples = index.tolist()
    columns = {
        "forwards": torch.tensor([notes.forwards[each] for each in examples]),
        "backwards": torch.tensor([notes.backwards[each] for each in examples]),
        "fooled_by": torch.tensor(
            [notes.fooled_by.get(each, -1) if yes else -1 for each, yes in zip(examples, fooled.tolist(), strict=True)]
        ),
    }
    for code in dict.fromkeys((*NOTICES, *notes.notices)):
        shown = notes.notices.get(code, set())
        columns[f"warning.{code}"] = torch.tensor([shown is None or each in shown for each in examples])
    columns["warning.blind-start"] &= ~fooled.cpu()  # another run was not blind, or lucky
    return columns

"""Robust accuracy under an attack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from bastion import journal
from bastion.attacks import Attack, Threat
from bastion.attacks.judge import judge
from bastion.probes import probes
from bastion.settings import settings
from bastion.types import Batch, Description, Fact, Probe


@probes.register("adversarial")
@settings(kw_only=False)
class Adversarial(Probe):
    """Robust accuracy: `correct` if the clean image is classified right and the attack returns no adversarial example.

    Images that are misclassified without an attack are not attacked.
    """

    threat: Threat  # the set that adversarial examples must lie in
    attack: Attack  # that looks for them

    role = "attack"
    makes_pictures = True
    facts: ClassVar[Mapping[str, str | Fact]] = {
        "correct": "right on the clean image, and not fooled by the attack",
        "in_budget": "the attack returned an image of the threat's set",
        "distance": Fact(
            "of the adversarial example from the image, in the threat's norm; NaN for survivors", "distance"
        ),
        "prediction": "on what the attack returned",
        "before": "the prediction on the clean image",
        "fooled_by": "the number of the ensemble's member that fooled it, -1 if none did",
        **journal.PASSES,
    }

    def describe(self) -> Description:
        return describe_attack(self.attack, self.threat)

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
            "fooled_by": fooling_members(notes, batch.index, verdict.fooled),
            **notes.columns(batch.index, verdict.fooled, verdict.inside),
            "clean": batch.x,
            "adversarial": verdict.x,
        }


def describe_attack(attack: Attack, threat: Threat) -> Description:
    """The description of a probe that runs this attack."""
    members = tuple(name for name, _ in attack.named_members(threat.norm))
    return Description(threat, members, attack.revisions(threat.norm), attack.passes(threat.norm))


def fooling_members(notes: journal.Journal, index: Tensor, fooled: Tensor) -> Tensor:
    """Return the number of the ensemble's member that fooled each of these examples, -1 if none did."""
    numbers = torch.tensor([notes.fooled_by.get(each, -1) for each in index.tolist()])
    return torch.where(fooled.cpu(), numbers, -1)

"""Robust accuracy on adversarial examples made for another model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor, nn

from bastion import forward, journal
from bastion.attacks import Attack, Threat
from bastion.attacks.judge import is_adversarial, run_attack
from bastion.forward import misclassified
from bastion.probes import probes
from bastion.probes.adversarial import describe_attack
from bastion.probes.other_models import identity, other_logits, other_model
from bastion.settings import settings
from bastion.types import Batch, Description, Fact, Probe


@probes.register("transfer")
@settings(kw_only=False)
class Transfer(Probe):
    """Accuracy on adversarial examples made for another model, the source: a run, a model folder or `zoo/NAME`.

    Every example is attacked, so that the facts of the source do not depend on the measured model. `correct` if the
    clean image is classified right and the attacked one is not adversarial.
    """

    source: str
    threat: Threat
    attack: Attack
    identity: str = field(init=False, default="")  # of the source, which facts depend on

    role = "attack"
    makes_pictures = True
    facts: ClassVar[Mapping[str, str | Fact]] = {
        "correct": "right on the clean image and on what the attack made for the source",
        "in_budget": "the attack returned an image of the threat's set",
        "source_fooled": "the attack fooled the source",
        "distance": Fact(
            "of the adversarial example from the image, in the threat's norm; NaN for survivors", "distance"
        ),
        "prediction": "on what the attack returned",
        "before": "the prediction on the clean image",
        "forwards": "forward passes of the source spent on the image",
        "backwards": "backward passes of the source spent on the image",
    }

    def describe(self) -> Description:
        return describe_attack(self.attack, self.threat)

    def __post_init__(self) -> None:
        object.__setattr__(self, "identity", identity(self.source))

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        where = "probe transfer, source"
        source = other_model(self.source, self.identity, model, batch, where)
        with journal.opened() as notes:
            x = run_attack(self.attack, source, batch, self.threat, seed=seed)
        inside = self.threat.contains(batch.x, x)
        with torch.no_grad():
            clean, logits = forward.logits(model, batch.x), forward.logits(model, x)
        source_logits = other_logits(source, x, logits.shape[1], f"{where} {self.source}")
        right = ~misclassified(clean, batch.y)
        fooled = right & is_adversarial(self.threat, batch.x, x, logits, batch.y)
        source_fooled = is_adversarial(self.threat, batch.x, x, source_logits, batch.y)
        return {
            "correct": right & ~fooled,
            "in_budget": inside,
            "source_fooled": source_fooled,
            "distance": torch.where(fooled, self.threat.distance(batch.x, x), torch.nan).float(),
            "prediction": logits.argmax(1),
            "before": clean.argmax(1),
            **notes.columns(batch.index, source_fooled, inside),
            "clean": batch.x,
            "adversarial": x,
        }

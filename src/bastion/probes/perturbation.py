"""Adversarial perturbations as images: classified by the model itself and by others, and their energy by frequency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor, nn

from bastion import forward, journal
from bastion.attacks import Attack, Threat
from bastion.attacks.judge import is_adversarial, run_attack
from bastion.attacks.pgd import PGD
from bastion.forward import misclassified
from bastion.probes import probes
from bastion.probes.adversarial import describe_attack
from bastion.probes.other_models import identity, logits_of_others
from bastion.probes.spectrum import energy_shares
from bastion.settings import AtLeastOne, settings
from bastion.types import Batch, Description, Probe, hard


@probes.register("perturbation")
@settings
class Perturbation(Probe):
    """Whether the perturbation itself is classified as the image's class (Sec. 4.3.1, Table 9 of Debenedetti 2022).

    Every example is attacked, also misclassified ones. The perturbation is drawn as (δ + ε) / 2ε, and -δ as
    (ε - δ) / 2ε. Both are classified by the model itself and by `classifiers`: runs, model folders or `zoo/NAME`.
    """

    threat: Threat = field(default_factory=lambda: Threat("linf", 4 / 255))
    attack: Attack = field(default_factory=lambda: PGD(steps=100, rel_step=1.5 / 100))
    classifiers: tuple[str, ...] = ()
    bins: AtLeastOne = 16  # rings of frequencies
    identities: tuple[str, ...] = field(init=False, default=())  # of the classifiers, which facts depend on

    facts: ClassVar[Mapping[str, str]] = {
        "fooled": "right on the clean image, and fooled by the attack",
        "before": "the prediction on the clean image",
        "prediction": "on what the attack returned",
        "top1": "the picture of δ is classified as the image's label: by the model itself, then by each classifier",
        "top5": "the label is among the first five classes for the picture of δ: model, then each classifier",
        "top1_negative": "the same as top1, of the picture of -δ",
        "top5_negative": "the same as top5, of the picture of -δ",
        "energy": "shares of the energy of δ in rings of frequencies, from 0 to √½ cycles per pixel",
        **journal.PASSES,
    }

    def __post_init__(self) -> None:
        object.__setattr__(self, "identities", tuple(map(identity, self.classifiers)))

    def describe(self) -> Description:
        return describe_attack(self.attack, self.threat)

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        with journal.opened() as notes:
            x = run_attack(self.attack, model, batch, self.threat, seed=seed)
        with torch.no_grad():
            before, after = forward.logits(model, batch.x), forward.logits(model, x)
        fooled = ~misclassified(before, batch.y) & is_adversarial(self.threat, batch.x, x, after, batch.y)
        picture = as_picture(x - batch.x, self.threat)
        seen, negative = (self._ranked(model, batch.at(each)) for each in (picture, 1 - picture))
        return {
            "fooled": fooled,
            "before": before.argmax(1),
            "prediction": after.argmax(1),
            "top1": seen[0],
            "top5": seen[1],
            "top1_negative": negative[0],
            "top5_negative": negative[1],
            "energy": energy_shares(x - batch.x, self.bins).float(),
            **notes.columns(batch.index, fooled, self.threat.contains(batch.x, x)),
            "clean": batch.x,
            "adversarial": x,
        }

    def _ranked(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """(B, 1 + classifiers) bool: the label is the first class; the label is among the first five."""
        with torch.no_grad():
            own = forward.logits(model, batch.x)
        where = "probe perturbation, classifier"
        others = logits_of_others(self.classifiers, self.identities, model, batch, own.shape[1], where)
        first = [~misclassified(logits, batch.y) for logits in (own, *others)]
        top = [in_top(5, logits, batch.y) for logits in (own, *others)]
        return torch.stack(first, 1), torch.stack(top, 1)


def as_picture(delta: Tensor, threat: Threat) -> Tensor:
    """(δ + ε) / 2ε: pixels in [0, 1], 1/2 where nothing changes.

    In ℓ2 and ℓ1, where ε does not bound single pixels, ε is replaced by the largest change of the example.
    """
    largest = delta.abs().amax((1, 2, 3), keepdim=True)
    scale = torch.full_like(largest, threat.eps) if threat.norm == "linf" else largest
    return ((delta / scale.clamp(min=1e-30) + 1) / 2).clamp(0, 1)


def in_top(count: int, logits: Tensor, y: Tensor) -> Tensor:
    """(B,) bool: the label is among the `count` classes with the largest logits; false for NaN logits."""
    first = logits.topk(min(count, logits.shape[1]), dim=1).indices
    return (first == hard(y)[:, None]).any(1) & ~logits.isnan().any(1)

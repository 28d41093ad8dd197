"""Accuracy on low-pass and high-pass filtered images, and under filtered perturbations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from typing import Annotated, ClassVar

import torch
from annotated_types import MinLen
from torch import Tensor, nn

from bastion import forward, journal
from bastion.attacks import Attack, Threat
from bastion.attacks.judge import run_attack
from bastion.attacks.pgd import PGD
from bastion.forward import misclassified
from bastion.probes import probes
from bastion.probes.adversarial import describe_attack
from bastion.probes.spectrum import high_pass, low_pass
from bastion.settings import NotNegative, settings
from bastion.types import Batch, Description, Probe


@probes.register("frequency")
@settings
class Frequency(Probe):
    """Accuracy on low-pass and high-pass filtered images, and under perturbations filtered in the same way.

    Filters are ideal, at each of `cutoffs`, in cycles per pixel (`probes/spectrum.py`). High-pass filtered images keep
    their mean, and filtered images are clipped to [0, 1]. Every example is attacked; filtered perturbations are
    projected back into the threat's set.
    """

    cutoffs: Annotated[tuple[NotNegative, ...], MinLen(1)]
    threat: Threat = field(default_factory=lambda: Threat("linf", 4 / 255))
    attack: Attack = field(default_factory=PGD)

    facts: ClassVar[Mapping[str, str]] = {
        "clean": "right on the image as it is",
        "attacked": "right on what the attack returned",
        "low_pass": "right on the image's frequencies up to each cut-off",
        "high_pass": "right on the image's frequencies above each cut-off, and its mean",
        "attack_low_pass": "right on the image plus the perturbation's frequencies up to each cut-off",
        "attack_high_pass": "right on the image plus the perturbation's frequencies above each cut-off",
        **journal.PASSES,
    }

    def describe(self) -> Description:
        attack = describe_attack(self.attack, self.threat)
        return replace(attack, passes=attack.passes + 2 + 4 * len(self.cutoffs))

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        with journal.opened() as notes:
            attacked = run_attack(self.attack, model, batch, self.threat, seed=seed)
        x, delta = batch.x, attacked - batch.x
        mean = x.mean((2, 3), keepdim=True)
        right, right_attacked = _right(model, batch, [x, attacked]).unbind(1)

        def filtered(kept: Callable[[float], Tensor]) -> Tensor:
            return _right(model, batch, map(kept, self.cutoffs))

        return {
            "clean": right,
            "attacked": right_attacked,
            "low_pass": filtered(lambda cutoff: low_pass(x, cutoff).clamp(0, 1)),
            "high_pass": filtered(lambda cutoff: (mean + high_pass(x, cutoff)).clamp(0, 1)),
            "attack_low_pass": filtered(lambda cutoff: self.threat.project(x, x + low_pass(delta, cutoff))),
            "attack_high_pass": filtered(lambda cutoff: self.threat.project(x, x + high_pass(delta, cutoff))),
            **notes.columns(batch.index, right & ~right_attacked, self.threat.contains(x, attacked)),
        }


def _right(model: nn.Module, batch: Batch, variants: Iterable[Tensor]) -> Tensor:
    """(B, variants) bool: each variant of the images is classified right."""
    with torch.no_grad():
        return torch.stack([~misclassified(forward.logits(model, x), batch.y) for x in variants], 1)

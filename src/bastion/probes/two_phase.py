"""Robust accuracy under an ensemble whose last, costly members attack only a sample of the survivors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from bastion import journal, rng
from bastion.attacks import Attack, Threat
from bastion.attacks.ensemble import AutoAttack, Ensemble
from bastion.attacks.judge import judge
from bastion.errors import BastionError
from bastion.probes import probes
from bastion.probes.adversarial import describe_attack
from bastion.settings import AtLeastOne, Share, settings
from bastion.types import Batch, Description, Fact, Probe


@probes.register("two-phase")
@settings(kw_only=False)
class TwoPhase(Probe):
    """AutoAttack in two phases: the first members on every example, the others on a random sample of the survivors.

    A sampled example is attacked exactly as by the whole ensemble, so the share of the sample that is fooled estimates
    that of all survivors. `Facts.two_phase` has the estimate, with its interval.
    """

    threat: Threat
    share: Share  # of the survivors, drawn by seed and index
    attack: Attack = field(default_factory=AutoAttack)
    first: AtLeastOne = 2  # members that every example gets

    role = "attack"
    facts: ClassVar[Mapping[str, str | Fact]] = {
        "survived": Fact("right on the clean image, and not fooled by the first members", "phase"),
        "sampled": Fact("survived, and drawn for the other members", "phase"),
        "lost": Fact("sampled, and fooled by the other members", "phase"),
        "fooled_by": "the number of the member that fooled it, -1 if none did",
        **journal.PASSES,
    }

    def describe(self) -> Description:
        first, others = self._passes()
        return replace(describe_attack(self.attack, self.threat), passes=first + others)

    def _passes(self) -> tuple[int, int]:
        """Of the first members on an example, and of the others in the mean, as only some survivors are sampled."""
        passes = [member.passes(self.threat.norm) for _, member in self.attack.named_members(self.threat.norm)]
        return sum(passes[: self.first]), math.ceil(self.share * sum(passes[self.first :]))

    @property
    def batches(self) -> int:
        """Enough batches that the sample fills the model's batches about as well as the survivors of one batch."""
        return max(1, round(1 / self.share))

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        members = [member for _, member in self.attack.named_members(self.threat.norm)]
        if len(members) <= self.first:
            raise BastionError(
                f"probe two-phase: the attack has {len(members)} members under {self.threat.norm}, of which the first "
                f"{self.first} are for every example: none is left for the sample"
            )
        phases = Ensemble(members=tuple(members[: self.first])), Ensemble(members=tuple(members[self.first :]))
        (first, others), n = self._passes(), len(batch.x)
        with journal.opened() as notes:
            with journal.attacking(n, first + others, later=others):
                before = judge(model, batch, phases[0], self.threat, seed=seed)
            survived = before.clean & ~before.fooled
            drawn = rng.uniform(seed, batch.index, "two-phase").to(survived.device) < self.share
            sampled = survived & drawn
            by = dict(notes.fooled_by)
            lost, x = torch.zeros_like(sampled), before.x.clone()
            if sampled.any():
                with journal.attacking(n, first + others):
                    after = judge(model, batch.select(sampled), phases[1], self.threat, seed=seed)
                lost[sampled], x[sampled] = after.fooled, after.x
        by |= {each: self.first + number for each, number in notes.fooled_by.items() if each not in by}
        fooled = before.fooled | lost
        numbers = torch.tensor([by.get(each, -1) for each in batch.index.tolist()])
        return {
            "survived": survived,
            "sampled": sampled,
            "lost": lost,
            "fooled_by": torch.where(fooled.cpu(), numbers, -1),
            **notes.columns(batch.index, fooled, self.threat.contains(batch.x, x)),
        }

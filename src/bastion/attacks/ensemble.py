"""Ensembles of attacks, each run on the images that the ones before it did not fool; AutoAttack is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from annotated_types import MinLen
from torch import Tensor, nn

from bastion import forward, journal
from bastion.acceleration import accelerate
from bastion.attacks import attacks
from bastion.attacks.apgd import APGD
from bastion.attacks.fab import FAB
from bastion.attacks.judge import is_adversarial, lead
from bastion.attacks.square import Square
from bastion.forward import Best, check_batch, misclassified, predict
from bastion.settings import settings
from bastion.threat import Norm, Threat
from bastion.types import Attack, Batch

Version = Literal["standard", "plus", "rand"]


@attacks.register("ensemble")
@settings
class Ensemble(Attack):
    """Attacks one after another, each on the images that no earlier member has fooled, judged on the model as given."""

    members: Annotated[tuple[Attack, ...], MinLen(1)]  # in this order

    @property
    def eot(self) -> int:
        return max(member.eot for member in self.members)

    def named_members(self, norm: Norm) -> list[tuple[str, Attack]]:
        return [(member.describe(), member) for member in self.members]

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        return run_members(self.members, model, batch, threat, seed=seed)


@attacks.register("autoattack")
@settings
class AutoAttack(Attack):
    """AutoAttack (Croce and Hein 2020, 2021) with its official settings for each norm.

    Robust accuracy is usually reported with `standard`; `plus` has more restarts and losses; `rand`, for randomised
    models, averages gradients over 20 passes.
    """

    version: Version = "standard"  # which attacks run, with how many restarts

    @property
    def eot(self) -> int:
        return 20 if self.version == "rand" else 1

    # The settings of these members name no facts: raise `revision` when one changes.
    def named_members(self, norm: Norm) -> list[tuple[str, Attack]]:
        if self.version == "rand":
            ce, dlr = APGD(eot=self.eot, phases=False), APGD(loss="dlr", eot=self.eot, phases=False)
            return [("apgd-ce", ce), ("apgd-dlr", dlr)]
        fab_t, square = FAB(targets=9), Square()
        if self.version == "plus":
            return [
                ("apgd-ce", APGD(restarts=5, phases=False)),
                ("apgd-dlr", APGD(loss="dlr", restarts=5, phases=False)),
                ("fab", FAB(restarts=5)),
                ("square", square),
                ("apgd-t", APGD(loss="dlr", targets=9, phases=False)),
                ("fab-t", fab_t),
            ]
        apgd_ce, apgd_t = APGD(restarts=5 if norm == "l1" else 1), APGD(loss="dlr", targets=5 if norm == "l1" else 9)
        return [("apgd-ce", apgd_ce), ("apgd-t", apgd_t), ("fab-t", fab_t), ("square", square)]

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        members = [member for _, member in self.named_members(threat.norm)]
        return run_members(members, model, batch, threat, seed=seed)


def run_members(members: Sequence[Attack], model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
    """Run each attack on what is left; the clean logits are computed once, and the model is accelerated once."""
    given, batch = check_batch(model, batch, "ensemble")
    if len(batch.x) == 0:
        return batch.x
    model, clean, best = accelerate(model), predict(given, batch), Best(batch.x)
    batch, wrong = batch._replace(logits=clean), misclassified(clean, batch.y)
    if any(member.eot > 1 for member in members):
        wrong = torch.zeros_like(wrong)  # one wrong answer of a randomised model proves nothing
    best.offer(batch.x, lead(clean, batch.y), wrong)
    for number, member in enumerate(members):
        at = (~best.fooled).nonzero()[:, 0]
        if len(at) == 0:
            break
        left, later = batch.select(at), sum(each.passes(threat.norm) for each in members[number + 1 :])
        with journal.attacking(len(at), member.passes(threat.norm), later):
            x = member(model, left, threat, seed=seed)
        with torch.no_grad():
            logits = forward.logits(given, x, left.y)
        inside, fooled = threat.contains(left.x, x), is_adversarial(threat, left.x, x, logits, left.y)
        best.offer(x[inside], lead(logits, left.y)[inside], fooled[inside], at[inside])
        examples = left.index[fooled].tolist()
        journal.fooled(examples, number)
        if isinstance(member, Square) and number > 0:
            journal.note("square-beats-white-box", journal.differentiated(examples))
    return best.x

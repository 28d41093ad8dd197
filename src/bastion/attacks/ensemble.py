"""Attacks one after another, each on what the ones before it could not fool; AutoAttack is such an ensemble."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from bastion.attacks import attacks, journal
from bastion.attacks.apgd import APGD
from bastion.attacks.asking import ready
from bastion.attacks.fab import FAB
from bastion.attacks.judge import standing
from bastion.attacks.square import Square
from bastion.attacks.threat import Norm, Threat
from bastion.errors import BastionError
from bastion.registry import check_fields
from bastion.types import Attack, Batch

Version = Literal["standard", "plus", "rand"]


@attacks.register("ensemble")
@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """Attacks one after another: what a member has fooled, judged on the model as given, is not shown to the next."""

    members: tuple[Attack, ...]

    def __post_init__(self) -> None:
        if not self.members:
            raise BastionError("ensemble: needs at least one member")

    @property
    def eot(self) -> int:
        """Passes that a gradient is averaged over: more than one for models that draw random numbers."""
        return max(getattr(member, "eot", 1) for member in self.members)

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        batch = ready(model, batch, "ensemble")
        x = batch.x.clone()
        if len(x) == 0:
            return x
        right, best, _ = standing(model, batch)
        if self.eot > 1:
            right = torch.ones_like(right)  # the model draws random numbers: one wrong answer proves nothing
        for number, member in enumerate(self.members):
            if not right.any():
                break
            at = right.nonzero()[:, 0]
            survivors = batch.select(at)
            proposed = member(model, survivors, threat, seed=seed)
            still, lead, _ = standing(model, survivors.at(proposed))
            inside = threat.contains(survivors.x, proposed)
            fooled = ~still & inside
            better = fooled | (inside & (lead > best[at]))
            x[at[better]], best[at[better]] = proposed[better], lead[better]
            right[at[fooled]] = False
            self._report(number, survivors.index[fooled].tolist())
        return x

    def _report(self, number: int, fooled: list[int]) -> None:
        journal.fooled(fooled, number)
        if isinstance(self.members[number], Square) and number > 0:
            journal.note("square-beats-white-box", journal.sighted(fooled))


def described(attack: Attack) -> str:
    """In short: its name, and what is not as usual. `apgd(loss=dlr, targets=9)`"""
    if not is_dataclass(attack):
        return repr(attack)
    values = {field.name: getattr(attack, field.name) for field in fields(attack)}
    told = [f"{field.name}={values[field.name]}" for field in fields(attack) if values[field.name] != field.default]
    return type(attack).__name__.lower() + (f"({', '.join(told)})" if told else "")


@attacks.register("autoattack")
@dataclass(frozen=True, kw_only=True)
class AutoAttack:
    """AutoAttack (Croce and Hein 2020, 2021) with its official settings for each norm.

    `standard` is what robust accuracy is reported with; `plus` has more restarts and losses; `rand`, for models that
    draw random numbers, averages gradients over 20 passes.
    """

    version: Version = "standard"

    def __post_init__(self) -> None:
        check_fields(self, "autoattack")

    @property
    def eot(self) -> int:
        return self.ensemble("linf").eot  # the same in every norm

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        return self.ensemble(threat.norm)(model, batch, threat, seed=seed)

    def ensemble(self, norm: Norm) -> Ensemble:
        if self.version == "rand":
            runs = APGD(eot=20, phases=False), APGD(loss="dlr", eot=20, phases=False)
            return Ensemble(members=runs)
        fab, square = FAB(targets=9), Square()
        if self.version == "plus":
            ce, dlr = APGD(restarts=5, phases=False), APGD(loss="dlr", restarts=5, phases=False)
            targeted = APGD(loss="dlr", targets=9, phases=False)
            return Ensemble(members=(ce, dlr, FAB(restarts=5), square, targeted, fab))
        if norm == "l1":
            return Ensemble(members=(APGD(restarts=5), APGD(loss="dlr", targets=5), fab, square))
        return Ensemble(members=(APGD(), APGD(loss="dlr", targets=9), fab, square))

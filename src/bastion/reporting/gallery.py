"""Pictures of attacks: the clean image, the adversarial example and the rescaled perturbation."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bastion import storage
from bastion.measuring.facts import Facts
from bastion.measuring.measurement import MeasuredCase, MeasuredThreat
from bastion.measuring.store import Column
from bastion.reporting.axes import varying
from bastion.reporting.grids import class_name
from bastion.reporting.pictures import Picture, data_uri, rescaled, to_bytes
from bastion.reporting.tables import ReportedRun, SharedTable, threat_text
from bastion.suite import written

EXAMPLES = 8
_FACTS = ("before", "in_budget", "label", "prediction")


@dataclass(frozen=True)
class Example:
    truth: str
    clean: Picture
    adversarial: Picture
    perturbation: str  # a data URI


@dataclass(frozen=True)
class Gallery:
    label: str
    threat: str
    scale: str  # the perturbation that is drawn as black or white
    examples: list[Example]


@dataclass(frozen=True)
class _StoredPictures:
    """Stored pictures of one attack on one run's model."""

    run: ReportedRun
    facts: Facts
    label: str
    pictures: Mapping[str, Column]

    def right(self, positions: Column) -> Column:
        """Return (len(positions),) bool: the clean image is classified correctly."""
        before, label = (self.facts.at(self.label, name, positions) for name in ("before", "label"))
        return np.asarray(before == label)


def galleries(runs: Sequence[ReportedRun]) -> list[tuple[ReportedRun, list[Gallery]]]:
    """Return one gallery per run and attack with stored pictures; all runs show the same images of an attack."""
    shown: dict[int, list[Gallery]] = {run.number: [] for run in runs}
    for group in _stored_pictures(runs):
        positions = functools.reduce(np.intersect1d, [each.pictures["position"] for each in group])
        chosen = positions[choose(np.sum([each.right(positions) for each in group], axis=0))]
        for each in group:
            shown[each.run.number].append(_gallery(each, chosen))
    return [(run, shown[run.number]) for run in runs if shown[run.number]]


def _stored_pictures(runs: Sequence[ReportedRun]) -> list[list[_StoredPictures]]:
    """Group stored pictures by attack and data; measurements of a run that share a probe are counted once."""
    groups: dict[str, dict[tuple[int, str], _StoredPictures]] = {}
    for run in runs:
        for facts in (each for each in run.measurements if not run.outdated(each)):
            for case in _largest(facts.about.cases):
                group = groups.setdefault(storage.fingerprint([facts.about.data, case.label, case.spec, case.at]), {})
                if (run.number, case.store) not in group and (pictures := facts.pictures(case.label)):
                    group[run.number, case.store] = _StoredPictures(run, facts, case.label, pictures)
    return [list(group.values()) for group in groups.values() if group]


def _largest(cases: Iterable[MeasuredCase]) -> list[MeasuredCase]:
    """Return the variant of each attack with the largest eps, whose perturbations are easiest to see."""
    chosen: dict[str, MeasuredCase] = {}
    for case in cases:
        name = case.label
        for axis in varying(case):
            name = name.replace(f" {axis}={written(case.at[axis])}", "")
        if {*_FACTS} <= {*case.columns} and (name not in chosen or _eps(case) > _eps(chosen[name])):
            chosen[name] = case
    return list(chosen.values())


def _eps(case: MeasuredCase) -> float:
    return case.threat.eps if case.threat else 0.0


def _gallery(stored: _StoredPictures, positions: Column) -> Gallery:
    facts, label = stored.facts, stored.label
    rows = np.searchsorted(stored.pictures["position"], positions)
    clean, adversarial = stored.pictures["clean"][rows], stored.pictures["adversarial"][rows]
    fact = {name: facts.at(label, name, positions) for name in _FACTS}
    scale, scale_text = pixel_scale(facts.case(label).threat, adversarial - clean)
    examples = [
        _example({name: column[row] for name, column in fact.items()}, facts, clean[row], adversarial[row], scale)
        for row in range(len(positions))
    ]
    return Gallery(label, threat_text(facts, label), scale_text, examples)


def side_by_side(table: SharedTable, label: str) -> tuple[Column, list[dict[str, Column]]]:
    """Return the positions that every row has pictures of under this probe, and each row's pictures."""
    kept = [row.facts.pictures(label) for row in table.rows]
    if not all(kept):
        return np.zeros(0, np.int64), [{} for _ in kept]
    positions = functools.reduce(np.intersect1d, [each["position"] for each in kept])
    rows = [np.searchsorted(each["position"], positions) for each in kept]
    return positions, [
        {name: column[chosen] for name, column in each.items()} for each, chosen in zip(kept, rows, strict=True)
    ]


def choose(right: Column) -> Column:
    """Choose the first examples, those whose clean image most models get right first."""
    return np.argsort(-right.astype(np.int64), kind="stable")[:EXAMPLES]


def pixel_scale(threat: MeasuredThreat | None, delta: Column) -> tuple[float, str]:
    """Return the scale of pixel changes and its text: ε for ℓ∞, else the largest change in these examples."""
    if threat and threat.norm == "linf":
        return threat.eps, f"ε = {written(threat.eps)}"
    largest = float(np.abs(delta).max(initial=0))
    return largest, f"ε = {largest:.3g}, the largest change of a pixel in these examples"


def _example(fact: Mapping[str, Any], facts: Facts, clean: Column, adversarial: Column, scale: float) -> Example:
    truth, before, after = (class_name(facts.about.classes, fact[key]) for key in ("label", "before", "prediction"))
    outside = "" if fact["in_budget"] else "outside the budget: does not count"
    return Example(
        truth=truth,
        clean=predicted_picture(clean, before, right=bool(fact["before"] == fact["label"]), remark=f"is {truth}"),
        adversarial=predicted_picture(
            adversarial, after, right=bool(fact["prediction"] == fact["label"]), remark=outside
        ),
        perturbation=data_uri(rescaled(adversarial - clean, scale)),
    )


def predicted_picture(image: Column, prediction: str, *, right: bool, remark: str) -> Picture:
    """Return the image captioned with its predicted class, and with the remark if that is wrong."""
    caption = prediction if right or not remark else f"{prediction} ({remark})"
    return Picture(data_uri(to_bytes(image)), caption, "right" if right else "wrong")

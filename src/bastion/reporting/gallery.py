"""What an attack did, in pictures: the clean image, the attacked one, their difference made visible."""

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
from bastion.reporting.tables import Comparison, ReportedRun, threat_text
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
    scale: str  # how large a perturbation is drawn as black or white
    examples: list[Example]


@dataclass(frozen=True)
class _Kept:
    """Pictures of one attack on the model of one run."""

    run: ReportedRun
    facts: Facts
    label: str
    pictures: Mapping[str, Column]

    def right(self, positions: Column) -> Column:
        """(len(positions),) bool: classified right when clean."""
        before, label = (self.facts.at(self.label, name, positions) for name in ("before", "label"))
        return np.asarray(before == label)


def galleries(runs: Sequence[ReportedRun]) -> list[tuple[ReportedRun, list[Gallery]]]:
    """By run, one per attack of which pictures were kept; under the same attack all runs show the same images."""
    shown: dict[int, list[Gallery]] = {run.mark: [] for run in runs}
    for group in _kept(runs):
        positions = functools.reduce(np.intersect1d, [each.pictures["position"] for each in group])
        chosen = positions[choose(np.sum([each.right(positions) for each in group], axis=0))]
        for each in group:
            shown[each.run.mark].append(_gallery(each, chosen))
    return [(run, shown[run.mark]) for run in runs if shown[run.mark]]


def _kept(runs: Sequence[ReportedRun]) -> list[list[_Kept]]:
    """Of equal attacks on equal data together. Measurements of a run that share a probe share its pictures."""
    groups: dict[str, dict[tuple[int, str], _Kept]] = {}
    for run in runs:
        for facts in run.measurements:
            for case in _largest(facts.about.cases):
                group = groups.setdefault(storage.fingerprint([facts.about.data, case.label, case.spec, case.at]), {})
                if (run.mark, case.store) not in group and (pictures := facts.pictures(case.label)):
                    group[run.mark, case.store] = _Kept(run, facts, case.label, pictures)
    return [list(group.values()) for group in groups.values() if group]


def _largest(cases: Iterable[MeasuredCase]) -> list[MeasuredCase]:
    """Of each attack's variants along axes that with the largest budget: its perturbations are seen best."""
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


def _gallery(kept: _Kept, positions: Column) -> Gallery:
    facts, label = kept.facts, kept.label
    rows = np.searchsorted(kept.pictures["position"], positions)
    clean, adversarial = kept.pictures["clean"][rows], kept.pictures["adversarial"][rows]
    fact = {name: facts.at(label, name, positions) for name in _FACTS}
    scale, scale_text = pixel_scale(facts.case(label).threat, adversarial - clean)
    examples = [
        _example({name: column[row] for name, column in fact.items()}, facts, clean[row], adversarial[row], scale)
        for row in range(len(positions))
    ]
    return Gallery(label, threat_text(facts, label), scale_text, examples)


def side_by_side(comparison: Comparison, label: str) -> tuple[Column, list[dict[str, Column]]]:
    """Positions of the examples that every row has pictures of under this probe, and each row's pictures of them."""
    kept = [row.facts.pictures(label) for row in comparison.rows]
    if not all(kept):
        return np.zeros(0, np.int64), [{} for _ in kept]
    positions = functools.reduce(np.intersect1d, [each["position"] for each in kept])
    rows = [np.searchsorted(each["position"], positions) for each in kept]
    return positions, [
        {name: column[chosen] for name, column in each.items()} for each, chosen in zip(kept, rows, strict=True)
    ]


def choose(right: Column) -> Column:
    """The first examples, those that most models get right on the clean image before the others."""
    return np.argsort(-right.astype(np.int64), kind="stable")[:EXAMPLES]


def pixel_scale(threat: MeasuredThreat | None, delta: Column) -> tuple[float, str]:
    """ε bounds each pixel of an ℓ∞ perturbation; for any other, the largest change in sight takes its place."""
    if threat and threat.norm == "linf":
        return threat.eps, f"ε = {written(threat.eps)}"
    largest = float(np.abs(delta).max(initial=0))
    return largest, f"ε = {largest:.3g}, the largest change of a pixel in these examples"


def _example(fact: Mapping[str, Any], facts: Facts, clean: Column, adversarial: Column, scale: float) -> Example:
    truth, before, after = (class_name(facts.about.classes, fact[key]) for key in ("label", "before", "prediction"))
    outside = "" if fact["in_budget"] else "outside the budget: does not count"
    return Example(
        truth=truth,
        clean=judged(clean, before, right=bool(fact["before"] == fact["label"]), remark=f"is {truth}"),
        adversarial=judged(adversarial, after, right=bool(fact["prediction"] == fact["label"]), remark=outside),
        perturbation=data_uri(rescaled(adversarial - clean, scale)),
    )


def judged(image: Column, seen: str, *, right: bool, remark: str) -> Picture:
    """The remark is only for mistakes."""
    caption = seen if right or not remark else f"{seen} ({remark})"
    return Picture(data_uri(to_bytes(image)), caption, "right" if right else "wrong")

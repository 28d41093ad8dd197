"""Variants of a probe along an axis of the suite, such as several radii or image sizes. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bastion.measuring.facts import Facts
from bastion.measuring.measurement import MeasuredCase
from bastion.suite import CORRECT, written


@dataclass(frozen=True)
class Series:
    """Cases that differ in one axis only."""

    label: str  # without the axis
    norm: str  # of the threat; empty without one
    cases: tuple[MeasuredCase, ...]  # in order of value
    values: tuple[float, ...]


def is_variant(case: MeasuredCase, axis: str) -> bool:
    """Whether the axis has several values; only then does the label name the value."""
    return axis in case.at and without(case, axis) != case.label


def varying(case: MeasuredCase) -> list[str]:
    """Return the case's axes that have several values."""
    return [axis for axis in case.at if is_variant(case, axis)]


def without(case: MeasuredCase, axis: str) -> str:
    """Return the label without the value of the axis: `pgd eps=8/255` becomes `pgd`."""
    head, _, tail = f"{case.label} ".partition(f" {axis}={written(case.at[axis])} ")
    return f"{head} {tail}".strip()


def corruption(case: MeasuredCase) -> str:
    """Return the type of a corruption: the axis other than `severity`, or the label."""
    values = [written(value) for axis, value in case.at.items() if axis != "severity"]
    return ", ".join(values) or (without(case, "severity") if "severity" in case.at else case.label)


def is_one_corruption(labels: Iterable[str], cases: Mapping[str, MeasuredCase]) -> bool:
    """Whether these are severities of one type, whose mean is in the heat map."""
    chosen = [cases[label] for label in labels if label in cases]
    return all(case.role == "corruption" for case in chosen) and len({corruption(case) for case in chosen}) == 1


def series(facts: Facts, axis: str) -> list[Series]:
    """Return the probes that were measured at several values of the axis."""
    groups: dict[tuple[str, str], list[MeasuredCase]] = {}
    for case in facts.about.cases:
        if (
            case.kind == "probes"
            and CORRECT in case.columns
            and _is_number(case.at.get(axis))
            and is_variant(case, axis)
        ):
            norm = case.threat.norm if case.threat else ""
            groups.setdefault((without(case, axis), norm), []).append(case)
    found = []
    for (label, norm), cases in groups.items():
        ordered = sorted(cases, key=lambda case: float(case.at[axis]))
        found.append(Series(label, norm, tuple(ordered), tuple(float(case.at[axis]) for case in ordered)))
    return [each for each in found if len(each.cases) > 1]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

"""Accuracy over a radius or an image size, and distances to the nearest adversarial examples. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bastion.measuring.facts import Facts
from bastion.measuring.intervals import Estimate
from bastion.measuring.measurement import MeasuredCase
from bastion.measuring.store import Column
from bastion.reporting.axes import Series, series
from bastion.reporting.tables import SharedTable, TableRow
from bastion.suite import CORRECT

STEPS = 200  # most radii of a curve from distances


@dataclass(frozen=True)
class Line:
    """Accuracies of one run, with their intervals."""

    number: int  # of the run
    x: list[float]
    estimates: list[Estimate]


@dataclass(frozen=True)
class CurveChart:
    title: str
    norm: str  # of the radius; empty: x is an image size, or what `xlabel` says
    is_step: bool  # from distances, so exact at every radius
    lines: list[Line]
    xlabel: str = ""


@dataclass(frozen=True)
class Distances:
    """Distances of one run's nearest adversarial examples, under one probe."""

    name: str
    number: int  # of the run
    norm: str
    median: float  # over all examples: 0 for clean mistakes, infinite where none was found
    found: Column  # distances above zero at which an adversarial example was found
    mistakes: int
    unfooled: int


def security_curves(table: SharedTable) -> list[CurveChart]:
    """Return accuracies over eps, from an axis `eps` and from minimal distances."""
    measured = [_along(table, each, "eps") for each in series(table.rows[0].facts, "eps")]
    cases = distance_cases(table.rows[0].facts)
    return measured + [_from_distances(table, case) for case in cases]


def resolution_curves(table: SharedTable) -> list[CurveChart]:
    return [_along(table, each, "size") for each in series(table.rows[0].facts, "size")]


def _along(table: SharedTable, chosen: Series, axis: str) -> CurveChart:
    lines = []
    for row in table.rows:
        x = list(chosen.values)
        estimates = [row.facts.estimate(row.facts.correct(case.label)) for case in chosen.cases]
        if axis == "eps" and (clean := _clean(row, chosen.cases[0])) is not None:
            x, estimates = [0.0, *x], [clean, *estimates]
        lines.append(Line(row.run.number, x, estimates))
    return CurveChart(chosen.label, chosen.norm if axis == "eps" else "", False, lines)


def _clean(row: TableRow, attacked: MeasuredCase) -> Estimate | None:
    """Return the accuracy at radius 0 on the same variant of the data."""
    for case in row.facts.with_role("clean"):
        if CORRECT in case.columns and case.at.items() <= attacked.at.items():
            return row.facts.estimate(row.facts.correct(case.label))
    return None


def distance_cases(facts: Facts) -> list[MeasuredCase]:
    """Return the probes that search for the nearest adversarial example instead of one within a fixed eps."""
    return [case for case in facts.with_role("attack") if case.minimal_distance]


def norm_of(case: MeasuredCase) -> str:
    return case.threat.norm if case.threat else str(case.spec.get("norm", ""))


def _from_distances(table: SharedTable, case: MeasuredCase) -> CurveChart:
    columns = [row.facts.columns[f"{case.label}/{case.minimal_distance}"] for row in table.rows]
    finite = np.concatenate([column[np.isfinite(column)] for column in columns])
    radii = np.unique(np.append(finite, 0.0))
    if len(radii) > STEPS:
        radii = np.quantile(radii, np.linspace(0, 1, STEPS))
    lines = [
        Line(row.run.number, radii.tolist(), [row.facts.estimate(column > radius) for radius in radii])
        for row, column in zip(table.rows, columns, strict=True)
    ]
    return CurveChart(case.label, norm_of(case), True, lines)


def distances(table: SharedTable) -> dict[str, list[Distances]]:
    """Return the distances by probe, one per row."""
    return {case.label: [_distances(row, case) for row in table.rows] for case in distance_cases(table.rows[0].facts)}


def _distances(row: TableRow, case: MeasuredCase) -> Distances:
    column = row.facts.columns[f"{case.label}/{case.minimal_distance}"].astype(np.float64)
    return Distances(
        name=row.name,
        number=row.run.number,
        norm=norm_of(case),
        median=float(np.quantile(column, 0.5, method="inverted_cdf")),  # does not interpolate to infinity
        found=column[np.isfinite(column) & (column > 0)],
        mistakes=int((column == 0).sum()),
        unfooled=int(np.isinf(column).sum()),
    )

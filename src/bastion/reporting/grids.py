"""Accuracies by corruption and severity, and by class; the most frequent confusions. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bastion.measuring.facts import SHARE, Facts
from bastion.measuring.intervals import Estimate
from bastion.measuring.measurement import MeasuredCase
from bastion.measuring.store import Column
from bastion.reporting.axes import corruption
from bastion.reporting.tables import SharedTable, TableRow, corruption_mean, corruptions, per_example
from bastion.suite import CORRECT, written

CLASSES = 20  # of more classes only the least accurate are shown
CONFUSIONS = 8
MEAN = "mean"


@dataclass(frozen=True)
class HeatMap:
    """Accuracy of one run; None where nothing was measured. The last row and column are means."""

    name: str
    number: int  # of the run
    columns: list[str]
    rows: list[tuple[str, list[Estimate | None]]]


@dataclass(frozen=True)
class ClassRow:
    name: str
    n: int
    accuracies: list[Estimate]  # for each run, one per column of `ClassTable`


@dataclass(frozen=True)
class ClassTable:
    """Accuracy by class. Every run has these columns."""

    columns: list[str]
    rows: list[ClassRow]
    left_out: int  # classes with higher accuracies


@dataclass(frozen=True)
class Confusion:
    truth: str
    predicted: str
    count: int
    share: float  # of the images of the true class


def heat_maps(table: SharedTable) -> list[HeatMap]:
    """Return one heat map per run, if there are several corruptions."""
    return [_heat_map(row) for row in table.rows] if len(corruptions(table.rows[0].facts)) > 1 else []


def _heat_map(row: TableRow) -> HeatMap:
    facts = row.facts
    cells = {(corruption(case), _severity(case)): facts.correct(case.label) for case in corruptions(facts)}
    kinds = list(dict.fromkeys(kind for kind, _ in cells))
    severities = sorted(dict.fromkeys(severity for _, severity in cells), key=_order)
    rows = [(kind, _with_mean(facts, [cells.get((kind, each)) for each in severities])) for kind in kinds]
    last = [_mean(facts, [column for (_, each), column in cells.items() if each == level]) for level in severities]
    rows.append((MEAN, [*last, facts.estimate(corruption_mean(facts), SHARE)]))
    return HeatMap(row.name, row.run.number, [*map(written, severities), MEAN], rows)


def _severity(case: MeasuredCase) -> Any:
    return case.at.get("severity", "accuracy")


def _order(severity: Any) -> tuple[bool, Any]:
    return isinstance(severity, str), severity


def _with_mean(facts: Facts, columns: Sequence[Column | None]) -> list[Estimate | None]:
    measured = [column for column in columns if column is not None]
    return [*(None if column is None else facts.estimate(column) for column in columns), _mean(facts, measured)]


def _mean(facts: Facts, columns: Sequence[Column]) -> Estimate:
    return facts.estimate(np.asarray(np.mean(columns, axis=0)), SHARE)


def clean_predictions(facts: Facts) -> MeasuredCase | None:
    """Return the first clean probe that stores predictions."""
    wanted = {CORRECT, "prediction", "label"}
    return next((case for case in facts.with_role("clean") if wanted <= {*case.columns}), None)


def class_table(table: SharedTable) -> ClassTable | None:
    """Return accuracies by class on clean images, and in the worst case if the suite has one."""
    case = clean_predictions(table.rows[0].facts)
    if case is None:
        return None
    worst = [name for name, each in table.about.aggregates.items() if each.kind == "worst"][:1]
    shown = [case.label, *worst]
    labels = table.rows[0].facts.columns[f"{case.label}/label"]
    columns = [(row.facts, per_example(row.facts, name)) for row in table.rows for name in shown]
    rows = [
        ClassRow(
            class_name(table.about.classes, each),
            int((labels == each).sum()),
            [facts.estimate(column[labels == each]) for facts, column in columns],
        )
        for each in np.unique(labels)
    ]
    if len(rows) > CLASSES:
        rows = sorted(rows, key=lambda row: sum(each.value for each in row.accuracies))
    return ClassTable(shown, rows[:CLASSES], max(0, len(rows) - CLASSES))


def confusions(facts: Facts) -> list[Confusion]:
    """Return the most frequent misclassifications of clean images."""
    case = clean_predictions(facts)
    if case is None:
        return []
    labels, predicted = (facts.columns[f"{case.label}/{name}"] for name in ("label", "prediction"))
    wrong = np.stack([labels, predicted])[:, labels != predicted]
    pairs, counts = np.unique(wrong, axis=1, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:CONFUSIONS]
    names = facts.about.classes
    return [
        Confusion(
            truth=class_name(names, pairs[0, each]),
            predicted=class_name(names, pairs[1, each]),
            count=int(counts[each]),
            share=float(counts[each] / (labels == pairs[0, each]).sum()),
        )
        for each in most
    ]


def class_name(classes: Sequence[str], index: Any) -> str:
    return classes[index] if 0 <= index < len(classes) else f"class {index}"

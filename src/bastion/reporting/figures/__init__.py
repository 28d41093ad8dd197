"""Figures of the report, by the name of the probe or study whose facts they show. One file each; no torch.

    @figures.register("norms")
    @by_case
    def norms(table: SharedTable, case: MeasuredCase) -> list[Figure]: ...

`case` is one of this probe or study in the suite, the same in every row of the table. Without `by_case` the function
gets all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup

from bastion.measuring.measurement import MeasuredCase
from bastion.measuring.store import Column
from bastion.registry import Registry
from bastion.reporting.tables import SharedTable, TableRow


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]  # headers; the first is that of the rows' names
    rows: Sequence[tuple[str, Sequence[str]]]


@dataclass(frozen=True)
class Figure:
    """Panels side by side, a table, or both."""

    title: str
    panels: Sequence[Markup] = field(default=(), repr=False)  # SVG, as `svg.inline` makes it, or other HTML
    caption: str = ""
    table: Table | None = None
    legend: bool = True  # panels use the colours of the runs
    wraps: bool = False  # panels are as wide as their content; by default all have the same width


figures: Registry[list[Figure]] = Registry("figure", __name__, Figure)  # type: ignore[arg-type]


def by_case(
    draw_case: Callable[[SharedTable, MeasuredCase], Iterable[Figure]],
) -> Callable[[SharedTable, Sequence[MeasuredCase]], list[Figure]]:
    """Make a function that draws one case into one that draws all of a probe or study."""

    @functools.wraps(draw_case)
    def draw_cases(table: SharedTable, cases: Sequence[MeasuredCase]) -> list[Figure]:
        return [figure for case in cases for figure in draw_case(table, case)]

    return draw_cases


def draw(table: SharedTable) -> list[Figure]:
    """The figures of all probes and studies, in the order of the suite."""
    by_name: dict[str, list[MeasuredCase]] = {}
    for case in table.about.cases:
        by_name.setdefault(str(case.spec.get("name", "")), []).append(case)
    return [
        figure
        for name, cases in by_name.items()
        if name in figures.names()
        for figure in figures.factory(name)(table, cases)
    ]


def fact(row: TableRow, case: MeasuredCase, name: str) -> Column:
    """A column of a case, with the examples of a probe, or the parts of a study, along the first axis."""
    return row.facts.columns[f"{case.label}/{name}"]


def single_fact(row: TableRow, case: MeasuredCase, name: str) -> Column:
    """A fact of a study that has one part."""
    return np.asarray(fact(row, case, name)[0])

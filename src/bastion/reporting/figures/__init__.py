"""Figures of the report, by the name of the probe or study whose facts they show. One file each; no torch.

    @figures.register("norms")
    def norms(table: SharedTable, cases: Sequence[MeasuredCase], key: str) -> list[Figure]: ...

`cases` are those of this probe or study in the suite, the same in every row of the table. `key` is the prefix of
the ids of all that is drawn, so that ids are unique on a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from markupsafe import Markup

from bastion.measuring.measurement import MeasuredCase
from bastion.measuring.store import Column
from bastion.registry import Registry
from bastion.reporting import svg
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


def draw(table: SharedTable, key: str) -> list[Figure]:
    """The figures of all probes and studies, in the order of the suite."""
    by_name: dict[str, list[MeasuredCase]] = {}
    for case in table.about.cases:
        by_name.setdefault(str(case.spec.get("name", "")), []).append(case)
    return [
        figure
        for name, cases in by_name.items()
        if name in figures.names()
        for figure in figures.factory(name)(table, cases, f"{key}-{name}")
    ]


def fact(row: TableRow, case: MeasuredCase, name: str) -> Column:
    """A column of a case, with the examples of a probe, or the parts of a study, along the first axis."""
    return row.facts.columns[f"{case.label}/{name}"]


def single_fact(row: TableRow, case: MeasuredCase, name: str) -> Column:
    """A fact of a study that has one part."""
    return np.asarray(fact(row, case, name)[0])


def line_style(row: TableRow, markersize: float = 7) -> dict[str, Any]:
    """Colour and marker of a run, for matplotlib."""
    number = row.run.number
    return {
        "color": svg.colour(number),
        "marker": svg.marker(number),
        "markersize": markersize,
        "markeredgecolor": svg.PAPER,
    }

"""Figures of the report, by the name of the probe or study whose facts they show. One file each; no torch.

    @figures.register("norms")
    def norms(comparison: Comparison, cases: Sequence[MeasuredCase], key: str) -> list[Figure]: ...

`cases` are those of the suite that this probe or study answers, the same in every row of the comparison. `key` begins
the ids of whatever is drawn, so that no two drawings of a page share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from bastion.measuring.facts import MeasuredCase
from bastion.registry import Registry
from bastion.reporting.tables import Comparison


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]  # the first is of the rows' names
    rows: Sequence[tuple[str, Sequence[str]]]


@dataclass(frozen=True)
class Figure:
    """A drawing of some panels side by side, a table, or both."""

    title: str
    panels: Sequence[Markup] = field(default=(), repr=False)  # SVG, as `svg.inline` makes it, or other HTML
    caption: str = ""
    table: Table | None = None
    legend: bool = True  # panels have the colours of the runs
    wraps: bool = False  # panels are as wide as they need; by default all have the same width


figures: Registry[list[Figure]] = Registry("figure", __name__, Figure)  # type: ignore[arg-type]


def draw(comparison: Comparison, key: str) -> list[Figure]:
    """Of every probe and study that has figures, in the order of the suite."""
    by_name: dict[str, list[MeasuredCase]] = {}
    for case in comparison.about.cases:
        by_name.setdefault(str(case.spec.get("name", "")), []).append(case)
    return [
        figure
        for name, cases in by_name.items()
        if name in figures.names()
        for figure in figures.factory(name)(comparison, cases, f"{key}-{name}")
    ]

"""Sharpness of the minimum: worst loss nearby, and the Hessian's largest eigenvalues and trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from bastion.measuring.measurement import MeasuredCase
from bastion.reporting import svg
from bastion.reporting.figures import Figure, Table, figures, line_style, single_fact
from bastion.reporting.tables import SharedTable, TableRow
from bastion.reporting.wording import quantity

CAPTION = (
    "Of the mean cross-entropy as a function of the weights. The rise is to the largest loss that gradient ascent "
    "finds where every weight tensor moves by at most ρ of its length. Eigenvalues are Lanczos's, each with its "
    "residual, which bounds its error; copies of a multiple eigenvalue may be missing. The trace is Hutchinson's "
    "estimate ± its standard error."
)
FACTS = ("loss", "rise", "top", "residuals", "lowest", "trace", "trace_error")
COLUMNS = ["loss", "rise in the ball", "largest eigenvalue", "smallest found", "trace"]


@figures.register("sharpness")
def sharpness(table: SharedTable, cases: Sequence[MeasuredCase], key: str) -> list[Figure]:
    """A panel for each loss."""
    panels = [_panel(table, case, f"{key}-{number}") for number, case in enumerate(cases)]
    rows = [
        (f"{row.name}, {case.label}" if len(cases) > 1 else row.name, _cells(row, case))
        for case in cases
        for row in table.rows
    ]
    return [Figure("Sharpness", panels, CAPTION, Table(["run", *COLUMNS], rows))]


def _panel(table: SharedTable, case: MeasuredCase, key: str) -> Markup:
    with svg.figure(360, 250) as drawn:
        axes = svg.axes(drawn, left=44, right=10, top=30, bottom=44)
        axes.set_title(f"{case.label}: eigenvalues of the Hessian", loc="left", fontsize=13)
        for row in table.rows:
            values = single_fact(row, case, "eigenvalues")
            errors = single_fact(row, case, "residuals")
            axes.errorbar(np.arange(1, len(values) + 1), values, errors, linewidth=1.3, **line_style(row))
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("the largest first")
        axes.grid(axis="y")
        return svg.inline(drawn, key, f"{case.label}: largest eigenvalues of the Hessian")


def _cells(row: TableRow, case: MeasuredCase) -> list[str]:
    facts: dict[str, Any] = {name: single_fact(row, case, name) for name in FACTS}
    lowest = row.facts.columns.get(f"{case.label}/lowest_residual")  # None: measured before it was stored
    return [
        quantity(facts["loss"]),
        quantity(facts["rise"]),
        f"{quantity(facts['top'])} ± {facts['residuals'][0]:.1g}",
        quantity(facts["lowest"]) + ("" if lowest is None else f" ± {lowest[0]:.1g}"),
        f"{quantity(facts['trace'])} ± {facts['trace_error']:.2g}",
    ]

"""Sharpness of the minimum: worst loss nearby, and the Hessian's largest eigenvalues and trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from bastion.measuring.measurement import MeasuredCase
from bastion.reporting import svg
from bastion.reporting.figures import Figure, Table, figures, single_fact
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
def sharpness(table: SharedTable, cases: Sequence[MeasuredCase]) -> list[Figure]:
    """A panel for each loss."""
    panels = [_panel(table, case) for case in cases]
    rows = [
        (f"{row.name}, {case.label}" if len(cases) > 1 else row.name, _cells(row, case))
        for case in cases
        for row in table.rows
    ]
    return [Figure("Sharpness", panels, CAPTION, Table(["run", *COLUMNS], rows))]


def _panel(table: SharedTable, case: MeasuredCase) -> Markup:
    with svg.panel(360, 250, left=44, right=10) as axes:
        axes.set(title=f"{case.label}: eigenvalues of the Hessian", xlabel="the largest first")
        for row in table.rows:
            values, errors = (single_fact(row, case, name) for name in ("eigenvalues", "residuals"))
            places = np.arange(1, len(values) + 1)
            axes.errorbar(places, values, errors, linewidth=1.3, **svg.line_style(row.run.number))
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return svg.inline(axes, f"{case.label}: largest eigenvalues of the Hessian")


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

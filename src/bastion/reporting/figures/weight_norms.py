"""Norms of the weights from input to output, and the term of a generalisation bound."""

from __future__ import annotations

import math

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from bastion.measuring.measurement import MeasuredCase
from bastion.reporting import svg
from bastion.reporting.figures import Figure, Table, by_case, figures, single_fact
from bastion.reporting.tables import SharedTable, TableRow
from bastion.reporting.wording import count, quantity
from bastion.suite import written

CAPTION = (
    "Weights of linear and convolutional layers as matrices with a row for each output. The last column is the largest "
    "2ε·b₁·b₂ / (γ√n) of a block: the term of Theorem 1 of Tang et al. that has eps. It needs blocks with attention "
    "and feed-forward layers."
)
COLUMNS = ["run", "sum of ℓ1 norms", "largest spectral norm", "sum of (2,1) norms", "margin γ", "n"]
EPS = 8 / 255  # unless the suite says another


@figures.register("weight-norms")
@by_case
def weight_norms(table: SharedTable, case: MeasuredCase) -> list[Figure]:
    columns = [*COLUMNS, f"largest term at ε = {written(float(case.spec.get('eps', EPS)))}"]
    panels = [_panel(table, case, "spectral", "weight, from input to output", "spectral norm")]
    if any(np.isfinite(single_fact(row, case, "term")).any() for row in table.rows):
        panels.append(_panel(table, case, "term", "block", "2ε·b₁·b₂ / (γ√n)"))
    return [Figure("Norms of the weights", panels, CAPTION, Table(columns, [_row(row, case) for row in table.rows]))]


def _panel(table: SharedTable, case: MeasuredCase, name: str, across: str, title: str) -> Markup:
    with svg.panel(360, 250, left=40, right=10) as axes:
        axes.set(title=title, xlabel=across)
        for row in table.rows:
            values = single_fact(row, case, name)
            axes.plot(np.arange(1, len(values) + 1), values, linewidth=1.3, **svg.line_style(row.run.number, 5))
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return svg.inline(axes, f"{title} by {across}")


def _row(row: TableRow, case: MeasuredCase) -> tuple[str, list[str]]:
    term, gamma = float(single_fact(row, case, "largest_term")), float(single_fact(row, case, "gamma"))
    return row.name, [
        count(float(single_fact(row, case, "l1").sum())),
        quantity(float(single_fact(row, case, "spectral").max())),
        count(float(single_fact(row, case, "norm_21").sum())),
        quantity(gamma),
        f"{int(single_fact(row, case, 'n')):,}",
        quantity(term) if math.isfinite(term) else "–",
    ]

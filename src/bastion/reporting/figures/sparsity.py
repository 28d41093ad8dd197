"""Distribution of the weights, by role (Figs. 1 and 2 of Tang et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from bastion.measuring.measurement import MeasuredCase
from bastion.reporting import svg
from bastion.reporting.figures import Figure, Table, by_case, figures, single_fact
from bastion.reporting.tables import SharedTable, TableRow
from bastion.reporting.wording import percent, quantity

KINDS = (
    "all weights",
    "convolution",
    "QKV",
    "attention projection",
    "feed-forward",
)  # rows of the facts; the last is other
CAPTION = (
    "Density of the values of weights, on a logarithmic scale. The table has the share of weights below 0.01 of the "
    "largest of the whole model, the same with the largest of each tensor, and the kurtosis, which is 3 for a normal "
    "distribution. Only linear and convolutional layers count, not biases and norms; convolutions that are a part of "
    "an attention or feed-forward layer count there."
)


@figures.register("sparsity")
@by_case
def sparsity(table: SharedTable, case: MeasuredCase) -> list[Figure]:
    """A panel for each kind of weights that any of the models has."""
    margin = float(case.spec.get("margin", 0.01))
    shown = [number for number in range(len(KINDS)) if any(_count(row, case, number) for row in table.rows)]
    panels = [_panel(table, case, number) for number in shown]
    columns = ["run", *(KINDS[number] for number in shown), "all, by tensor", "kurtosis"]
    rows = [(row.name, _cells(row, case, shown)) for row in table.rows]
    caption = CAPTION.replace("0.01", f"{margin:g}")
    return [Figure("Sparsity of the weights", panels, caption, Table(columns, rows))]


def _panel(table: SharedTable, case: MeasuredCase, number: int) -> Markup:
    with svg.panel(360, 250, left=44, right=10) as axes:
        axes.set(title=f"{KINDS[number]}: density", xlabel="value of a weight")
        for row in table.rows:
            counts = single_fact(row, case, "histogram")[number]
            if not counts.sum():
                continue
            edges = np.linspace(-1, 1, len(counts) + 1) * float(single_fact(row, case, "largest"))
            density = counts / (counts.sum() * (edges[1] - edges[0]))
            paint = svg.colour(row.run.number)
            axes.stairs(np.where(density > 0, density, np.nan), edges, color=paint, linewidth=1.3, baseline=None)
        axes.set_yscale("log")
        svg.decades(axes.yaxis)
        return svg.inline(axes, f"{KINDS[number]}: density of their values")


def _cells(row: TableRow, case: MeasuredCase, shown: Sequence[int]) -> list[str]:
    shares = [float(single_fact(row, case, "share")[number]) for number in shown]
    own = float(single_fact(row, case, "share_by_tensor")[0])
    kurtosis = float(single_fact(row, case, "kurtosis")[0])
    return [*(f"{percent(share)} %" if math.isfinite(share) else "–" for share in [*shares, own]), quantity(kurtosis)]


def _count(row: TableRow, case: MeasuredCase, number: int) -> int:
    return int(single_fact(row, case, "count")[number])

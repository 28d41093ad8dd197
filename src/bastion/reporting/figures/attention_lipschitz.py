"""Attention's Lipschitz constant: measured, and the upper bound on a bounded domain (Wang and Ruan 2022, Theorem 1)."""

from __future__ import annotations

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from bastion.measuring.measurement import MeasuredCase
from bastion.measuring.store import Column
from bastion.reporting import svg
from bastion.reporting.figures import Figure, Table, by_case, fact, figures
from bastion.reporting.tables import SharedTable, TableRow
from bastion.reporting.wording import quantity

CAPTION = (
    "The largest singular value of the Jacobian of each self-attention, largest over the images (marks, solid lines), "
    "and the upper bound of its Lipschitz constant (dashed): left for all tokens that its LayerNorm can give, so for "
    "every image; right for tokens no longer than those of the images, multiplied by the scale, medians over the "
    "blocks. The bound grows as the square of the tokens' length: without a bound on tokens, attention has no "
    "Lipschitz constant; nor has it one for every image where no LayerNorm stands directly before it. The residual "
    "bounds the error of every measured value, as a share of it."
)

COLUMNS = ["largest measured", "residual", "bound for tokens as long", "bound for every image", "bound / measured"]


@figures.register("attention-lipschitz")
@by_case
def attention_lipschitz(table: SharedTable, case: MeasuredCase) -> list[Figure]:
    panels = [_by_block(table, case), _by_scale(table, case)]
    numbers = Table(["run", *COLUMNS], [(row.name, _cells(row, case)) for row in table.rows])
    return [Figure(f"{case.label}: Lipschitz constants of self-attention", panels, CAPTION, numbers)]


def _attending(table: SharedTable, case: MeasuredCase) -> list[TableRow]:
    """Rows of models that have self-attention of a known form."""
    return [row for row in table.rows if _attends(row, case)]


def _attends(row: TableRow, case: MeasuredCase) -> bool:
    return bool(np.isfinite(_fact(row, case, "block")).any())


def _fact(row: TableRow, case: MeasuredCase, name: str) -> Column:
    """A column with the blocks along the first axis, as float64."""
    return fact(row, case, name).astype(np.float64)


def _by_block(table: SharedTable, case: MeasuredCase) -> Markup:
    with svg.panel(360, 250, left=46, right=12) as axes:
        axes.set_title("Lipschitz constant by block", x=-0.15)
        axes.set(yscale="log", xlabel="block, from input to output")
        for row in _attending(table, case):
            blocks, paint = 1 + _fact(row, case, "block"), svg.colour(row.run.number)
            axes.plot(blocks, _fact(row, case, "measured").max(1), linewidth=2, **svg.line_style(row.run.number))
            axes.plot(blocks, _fact(row, case, "bound"), color=paint, linewidth=1.6, linestyle=(0, (5, 3)))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
        svg.decades(axes.yaxis)
        return svg.inline(axes, f"{case.label}: Lipschitz constant of attention by block")


def _by_scale(table: SharedTable, case: MeasuredCase) -> Markup:
    with svg.panel(360, 250, left=46, right=12) as axes:
        axes.set_title("and of scaled tokens", x=-0.15)
        axes.set(xscale="log", yscale="log", xlabel="scale of the tokens")
        for row in _attending(table, case):
            scale, paint = _fact(row, case, "scale")[0], svg.colour(row.run.number)
            middle, bound = (np.median(_fact(row, case, name), axis=0) for name in ("scaled", "scaled_bound"))
            axes.plot(scale, middle, linewidth=2, **svg.line_style(row.run.number))
            axes.plot(scale, bound, color=paint, linewidth=1.6, linestyle=(0, (5, 3)))
        svg.decades(axes.xaxis)
        svg.decades(axes.yaxis)
        return svg.inline(axes, f"{case.label}: Lipschitz constant of attention at scaled tokens")


def _cells(row: TableRow, case: MeasuredCase) -> list[str]:
    if not _attends(row, case):
        return ["no attention of a known form", *["–"] * (len(COLUMNS) - 1)]
    measured = _fact(row, case, "measured").max(1)
    own, every = _fact(row, case, "reached_bound"), _fact(row, case, "bound")
    return [
        quantity(float(measured.max())),
        f"{_fact(row, case, 'residual').max():.0e}",
        _range(own),
        _range(every),
        f"× {quantity(float(np.median(own / measured)))}",
    ]


def _range(values: Column) -> str:
    """Over the blocks."""
    low, high = float(values.min()), float(values.max())
    return f"{quantity(low)} to {quantity(high)}" if low < high else quantity(low)

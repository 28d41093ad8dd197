"""Singular values of Jacobians by layer (Wang and Ruan 2022, Fig. 3), and the paper's aggregates of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from bastion.measuring.correlation import spearman
from bastion.measuring.facts import Facts
from bastion.measuring.intervals import Estimate
from bastion.measuring.measurement import MeasuredCase
from bastion.measuring.store import Column
from bastion.reporting import svg
from bastion.reporting.figures import Figure, Table, by_case, fact, figures
from bastion.reporting.tables import SharedTable, TableRow
from bastion.reporting.wording import norm_sign, quantity

WIDTH, HEIGHT = 360, 250
WIDE = 30  # ratio of the largest to the smallest value above which the axis is logarithmic
TITLES = {
    "block": "largest singular value of each block with its skip connection, x + F(x)",
    "branch": "largest singular value of each block's branch F",
}
SCALARS = {"table_1": "Table 1: largest block", "exponent": "Σσ of F"}
PARTS = {"embedding": "embedding", "head": "head", "network": "whole network"}

AGGREGATES = (
    "Largest singular values, mean (standard deviation) over the images with the interval of the mean. Table 1 of "
    "Wang and Ruan is of the images that are classified right: with the skip connection, the largest over the blocks. "
    "The embedding is from pixels to the first block, the head from the last block to logits. Products with J and Jᵀ "
    "are of an image; the largest residual bounds the error of every value, as a share of the largest one."
)
DISTANCES = (
    "Every point is an image that is classified right: the length of the smallest perturbation found, over the sum of "
    "the blocks' largest singular values, the exponent of Eq. 15. Theorem 2 has it that a larger exponent goes with a "
    "smaller distance, a negative rank correlation (Spearman’s)."
)


@figures.register("jacobian")
@by_case
def jacobian(table: SharedTable, case: MeasuredCase) -> list[Figure]:
    violins = [_violins(table, case, part) for part in TITLES if part in case.columns]
    return [*violins, _aggregates(table, case), *_distances(table, case)]


def values(facts: Facts, case: MeasuredCase, part: str) -> Column:
    """(n, blocks) or (n,): the largest singular value."""
    return facts.columns[f"{case.label}/{part}"][..., 0].astype(np.float64)


def _violins(table: SharedTable, case: MeasuredCase, part: str) -> Figure:
    """A panel of violins for each run, all with the same scale."""
    by_row = [values(row.facts, case, part) for row in table.rows]
    everything = np.concatenate([each[np.isfinite(each)] for each in by_row])
    panels = [_violin_panel(row, each, everything) for row, each in zip(table.rows, by_row, strict=True)]
    without = sum(int(np.isnan(each).all(0).sum()) for each in by_row)
    caption = "Each violin is the distribution over the images, with its median and its quartiles."
    if without:
        caption += f" {without} blocks change the shape of their input, so they have no branch."
    return Figure(f"{case.label}: {TITLES[part]}", panels, caption)


def _violin_panel(row: TableRow, by_block: Column, everything: Column) -> Markup:
    with svg.panel(WIDTH, HEIGHT, left=40, right=10) as axes:
        axes.set_title(row.name, x=-0.11)
        for number, column in enumerate(by_block.T, 1):
            column = column[np.isfinite(column)]
            if len(column):
                _violin(axes, column, number, svg.colour(row.run.number))
        if len(everything):
            _shared_scale(axes, everything)
        axes.set_xlim(0.4, by_block.shape[1] + 0.6)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
        axes.set_xlabel("block, from input to output")
        return svg.inline(axes, f"{row.name}: largest singular values by block")


def _violin(axes: Axes, column: Column, number: int, paint: str) -> None:
    low, middle, high = np.quantile(column, [0.25, 0.5, 0.75])
    if np.ptp(column) > 1e-6 * abs(middle):  # equal values have no density to draw
        drawn = axes.violinplot([column], [number], widths=0.8, showextrema=False)
        for body in drawn["bodies"]:  # type: ignore[attr-defined]
            body.set(facecolor=paint, edgecolor=paint, alpha=0.35)
    axes.plot([number, number], [low, high], color=paint, linewidth=3, solid_capstyle="butt")
    axes.plot(number, middle, "o", color=paint, markeredgecolor=svg.PAPER, markersize=6)


def _shared_scale(axes: Axes, everything: Column) -> None:
    low, high = float(everything.min()), float(everything.max())
    if low > 0 and high > WIDE * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.3, high * 1.3)
        svg.decades(axes.yaxis)
    else:
        axes.set_ylim(0, 1.05 * high)


def _aggregates(table: SharedTable, case: MeasuredCase) -> Figure:
    columns = {name: title for name, title in SCALARS.items() if name in case.columns}
    columns |= {name: title for name, title in PARTS.items() if name in case.columns}
    numbers = Table(
        ["run", *columns.values(), "products", "residual"],
        [(row.name, _cells(row, case, list(columns))) for row in table.rows],
    )
    return Figure(f"{case.label}: aggregates", caption=_aggregates_caption(table, case), table=numbers)


def _aggregates_caption(table: SharedTable, case: MeasuredCase) -> str:
    modes = {row.name: int(fact(row, case, "forward_mode").max()) for row in table.rows}
    said = [
        f" {name}: {count} searches took forward mode, as an operation has no second derivative."
        for name, count in modes.items()
        if count
    ]
    return AGGREGATES + "".join(said)


def _cells(row: TableRow, case: MeasuredCase, columns: Sequence[str]) -> list[str]:
    facts = row.facts
    cells: list[str] = []
    for name in columns:
        column = facts.columns[f"{case.label}/{name}"].astype(np.float64)
        column = column if column.ndim == 1 else column[:, 0]
        column = column[np.isfinite(column)]
        spread = f"{column.std(ddof=1):.3g}" if len(column) > 1 else ""
        mean = estimate_cell(facts.estimate(column), spread)
        cells.append(
            mean if name in SCALARS else Markup("{}<small>({})</small>").format(quantity(column.mean()), spread)
        )
    residuals = [facts.columns[f"{case.label}/{name}"] for name in case.columns if name.endswith("_residual")]
    products = facts.columns[f"{case.label}/products"].mean()
    return [*cells, f"{products:,.0f}", f"{max(float(np.nanmax(each)) for each in residuals):.0e}"]


def estimate_cell(found: Estimate, spread: str = "") -> Markup:
    """A mean, with its standard deviation if given, above its interval and n."""
    value = f"{quantity(found.value)} ({spread})" if spread else quantity(found.value)
    return Markup("{}<small>{} to {}, n = {}</small>").format(value, quantity(found.low), quantity(found.high), found.n)


def _distances(table: SharedTable, case: MeasuredCase) -> list[Figure]:
    """Scatter plots of the exponent and the smallest distance, for every probe `distortion` of the suite."""
    wanted = [each for each in table.about.cases if each.spec.get("name") == "distortion"]
    if not wanted or "exponent" not in case.columns:
        return []
    panels = [_scatter(table, case, each) for each in wanted]
    compared = {"Σσ of F": "exponent", "σ of the network": "network"}
    compared = {name: column for name, column in compared.items() if column in case.columns}
    rows = [
        (
            f"{row.name}, {each.label}" if len(wanted) > 1 else row.name,
            [_correlation(row.facts, case, each, column) for column in compared.values()],
        )
        for each in wanted
        for row in table.rows
    ]
    numbers = Table(["run", *(f"rank correlation with {name}" for name in compared)], rows)
    return [Figure(f"{case.label}: singular values and smallest distances", panels, DISTANCES, numbers)]


def _pairs(facts: Facts, case: MeasuredCase, distortion: MeasuredCase, column: str) -> tuple[Column, Column]:
    """Singular values and distances of the images that are classified right."""
    distance = facts.columns[f"{distortion.label}/distance"].astype(np.float64)
    found = facts.columns[f"{case.label}/{column}"].astype(np.float64)
    found = found if found.ndim == 1 else found[:, 0]
    return found[distance > 0], distance[distance > 0]


def _scatter(table: SharedTable, case: MeasuredCase, distortion: MeasuredCase) -> Markup:
    sign = norm_sign(str(distortion.spec.get("norm", "")))
    with svg.panel(WIDTH, HEIGHT, left=48, right=14, grid="both") as axes:
        axes.set_title(f"smallest distance ({sign})", x=-0.14)
        for row in table.rows:
            exponent, distance = _pairs(row.facts, case, distortion, "exponent")
            finite = np.isfinite(distance)
            axes.plot(exponent[finite], distance[finite], linestyle="", alpha=0.75, **svg.line_style(row.run.number, 6))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("Σσ of F over the blocks")
        return svg.inline(axes, f"{distortion.label}: smallest distance over the sum of singular values")


def _correlation(facts: Facts, case: MeasuredCase, distortion: MeasuredCase, column: str) -> str:
    found = spearman(*_pairs(facts, case, distortion, column))
    if not np.isfinite(found.value):
        return "–"
    value, low, high = (f"{each:+.2f}".replace("-", "−") for each in found[:3])
    return Markup("{}<small>{} to {}, n = {}</small>").format(value, low, high, found.n)

"""The loss around the weights: contours and surfaces, or lines (Fig. 4 of Tang et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from bastion.measuring.measurement import MeasuredCase
from bastion.measuring.store import Column
from bastion.reporting import svg
from bastion.reporting.figures import Figure, Table, by_case, fact, figures
from bastion.reporting.tables import SharedTable, TableRow
from bastion.reporting.wording import quantity

LOSSES = ("clean", "adversarial")
RADII = (0.25, 0.5, 1.0)
STEPS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)  # levels of contours, times powers of ten
MANY = 12  # most contours; of more, every second one is left out
CAPTION = (
    "Mean cross-entropy at the weights plus α and β times random directions, each filter of which is as long as that "
    "of the weights. Biases, norms and BatchNorm's statistics stay. The table has the loss of the model, and its mean "
    "rise at distances from it."
)


class LossGrid(NamedTuple):
    """A loss of a model on the grid of α and β."""

    row: TableRow
    name: str  # clean or adversarial
    alpha: Column  # (rows,)
    beta: Column  # (columns,)
    loss: Column  # (rows, columns)


@figures.register("landscape")
@by_case
def landscape(table: SharedTable, case: MeasuredCase) -> Iterator[Figure]:
    by_name = {name: [_grid(row, case, name) for row in table.rows] for name in LOSSES if name in case.columns}
    grids = [grid for shown in by_name.values() for grid in shown]
    rises = Table(["run", "loss", *(f"rise at {radius:g}" for radius in RADII)], [_rises(grid) for grid in grids])
    if len(grids[0].beta) == 1:
        yield Figure(f"Loss along a direction ({case.label})", [*map(_lines, by_name.values())], CAPTION, rises)
        return
    top = _top(grids)
    levels = _levels(grids, top)
    for name, shown in by_name.items():
        contours, surfaces = [_contours(grid, levels) for grid in shown], [_surface(grid, top) for grid in shown]
        yield Figure(f"Contours of the {name} loss ({case.label})", contours, legend=False)
        yield Figure(f"The {name} loss as a surface ({case.label})", surfaces, legend=False)
    caption = CAPTION + " All panels share contours and heights."
    if any((grid.loss > top).any() for grid in grids):
        caption += f" Surfaces are cut off at {top:.3g}."
    if missing := sum(int(np.count_nonzero(~np.isfinite(grid.loss))) for grid in grids):
        caption += f" At {missing} points the loss is not finite."
    yield Figure(f"Rise of the loss ({case.label})", caption=caption, table=rises)


def _grid(row: TableRow, case: MeasuredCase, name: str) -> LossGrid:
    alpha, beta, loss = (fact(row, case, each) for each in ("alpha", "beta", name))
    return LossGrid(row, name, alpha, beta[0], loss)


def _top(grids: Sequence[LossGrid]) -> float:
    """The largest loss that is shown: at most ten times the largest loss of the models themselves."""
    shown = _on_log_scale(np.stack([grid.loss for grid in grids]))
    centres = _on_log_scale(np.array([_centre(grid) for grid in grids]))
    return float(min(shown.max(initial=0.0) or 1.0, 10 * centres.max(initial=0.0) or np.inf))


def _levels(grids: Sequence[LossGrid], high: float) -> list[float]:
    """Levels of contours: round numbers from the smallest loss above 0 to `high`."""
    low = _on_log_scale(np.stack([grid.loss for grid in grids])).min(initial=high)
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    levels = [step * 10.0**power for power in powers for step in STEPS if low < step * 10.0**power <= high]
    while len(levels) > MANY:
        levels = levels[-1::-2][::-1]
    return levels or [high]


def _on_log_scale(losses: Column) -> Column:
    """The losses that have a place on it, in a row."""
    return losses[np.isfinite(losses) & (losses > 0)]


def _centre(grid: LossGrid) -> float:
    return float(grid.loss[len(grid.alpha) // 2, len(grid.beta) // 2])


def _contours(grid: LossGrid, levels: Sequence[float]) -> Markup:
    with svg.panel(340, 340, left=44, right=14, grid="") as axes:
        axes.set_title(f"{grid.row.name}: {grid.name} loss")
        paint = svg.colour(grid.row.run.number)
        for level in levels:  # each a layer more of the same colour
            axes.contourf(grid.beta, grid.alpha, grid.loss, [level, np.inf], colors=[paint], alpha=0.09)
        lines = axes.contour(grid.beta, grid.alpha, grid.loss, levels, colors=[paint], linewidths=1.1)
        axes.clabel(lines, fmt=lambda level: f"{level:g}", fontsize=10, colors=[svg.INK])
        axes.plot(0, 0, linestyle="", **svg.line_style(grid.row.run.number, 8))
        axes.set_xlabel("β")
        axes.set_ylabel("α", rotation=0)
        return svg.inline(axes, f"{grid.row.name}: contours of the {grid.name} loss around the weights")


def _surface(grid: LossGrid, top: float) -> Markup:
    axes: Any
    with svg.panel(340, 300, left=0, right=20, top=18, bottom=0, grid="", projection="3d") as axes:
        axes.set_title(f"{grid.row.name}: {grid.name} loss", loc="left")
        beta, alpha = np.meshgrid(grid.beta, grid.alpha)
        paint = svg.colour(grid.row.run.number)
        # Filled with the paper's colour, so that what is behind stays hidden.
        axes.plot_surface(
            beta,
            alpha,
            np.minimum(grid.loss, top),
            rcount=21,
            ccount=21,
            color=svg.PAPER,
            edgecolor=paint,
            linewidth=0.7,
            shade=False,
        )
        axes.set(xlabel="β", ylabel="α", zlim=(0, top))
        axes.view_init(elev=28, azim=-55)
        for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
            axis.set_pane_color((0, 0, 0, 0))
            axis._axinfo["grid"] |= {"color": svg.GRID, "linewidth": 0.6}
        return svg.inline(axes, f"{grid.row.name}: the {grid.name} loss around the weights as a surface")


def _lines(grids: Sequence[LossGrid]) -> Markup:
    with svg.panel(360, 260, left=44, right=10) as axes:
        axes.set(title=f"{grids[0].name} loss", xlabel="α")
        for grid in grids:
            axes.plot(grid.alpha, grid.loss[:, 0], color=svg.colour(grid.row.run.number), linewidth=2)
        if any(len(_on_log_scale(grid.loss)) for grid in grids):
            axes.set_yscale("log")
            svg.decades(axes.yaxis)
        return svg.inline(axes, f"{grids[0].name} loss along a random direction")


def _rises(grid: LossGrid) -> tuple[str, list[str]]:
    centre = _centre(grid)
    rises = [_mean_at(grid, radius) - centre for radius in RADII]
    return f"{grid.row.name}, {grid.name}", [quantity(centre), *map(quantity, rises)]


def _mean_at(grid: LossGrid, radius: float) -> float:
    """Mean loss on a circle, or at both ends of a line; NaN outside of the grid. Between points by straight lines."""
    if radius > grid.alpha[-1] + 1e-9:
        return float("nan")
    if len(grid.beta) == 1:
        return float(np.interp([-radius, radius], grid.alpha, grid.loss[:, 0]).mean())
    angles = np.linspace(0, 2 * np.pi, 64, endpoint=False)
    return float(np.mean([_bilinear(grid, radius * np.cos(angle), radius * np.sin(angle)) for angle in angles]))


def _bilinear(grid: LossGrid, alpha: float, beta: float) -> float:
    along = [np.interp(beta, grid.beta, row) for row in grid.loss]
    return float(np.interp(alpha, grid.alpha, along))

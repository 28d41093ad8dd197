"""Charts of accuracy: with intervals, after each attack of an ensemble, and over radius or size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes

from bastion.measuring.intervals import Estimate
from bastion.reporting import svg
from bastion.reporting.robustness_curves import CurveChart, Line
from bastion.reporting.tables import SharedTable, TableRow
from bastion.reporting.wording import norm_sign, percent

_BACKING = {"facecolor": svg.PAPER, "edgecolor": "none", "pad": 1}  # keeps grid lines out of text
_ROW, _GAP, _HEAD, _FOOT = 22, 34, 18, 40  # of the accuracy chart, in pixels
_STAGE = 40  # height of a stage of the waterfall
WIDTH, HEIGHT = 360, 260  # of a panel
_LEVELS = (1, 2, 4, 8, 16, 32, 64)  # between ticks of an ℓ∞ radius


def accuracy_chart(table: SharedTable, width: int) -> Markup:
    """Draw every run's accuracy under every probe as a dot on its 95 % interval."""
    block = _GAP + _ROW * len(table.rows)
    height = _HEAD + block * len(table.charted) + _FOOT
    with svg.panel(width, height, left=6, right=52, top=_HEAD, bottom=_FOOT, grid="x") as axes:
        axes.set(xlim=(0, 100), ylim=(block * len(table.charted), 0), xticks=range(0, 101, 20), yticks=[])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("images classified right (%)")
        chance = 100 * table.chance
        axes.annotate(
            "chance", (chance, 0), (0, 5), textcoords="offset points", color=svg.MUTED, ha="center", fontsize=11
        )
        for position, label in enumerate(table.charted):
            top = block * position
            # Only beside the dots, so that the line does not cross text.
            axes.plot([chance] * 2, [top + _GAP, top + block], color=svg.MUTED, linewidth=1, linestyle=(0, (2, 3)))
            _draw_probe(axes, table, label, top)
        return svg.inline(axes, f"Accuracy with 95 % intervals: {table.title}, n = {table.n}")


def _draw_probe(axes: Axes, table: SharedTable, label: str, top: float) -> None:
    """Draw the probe's name, then a line for each run with its number at the right edge."""
    beside: dict[str, Any] = {"textcoords": "offset points", "annotation_clip": False}
    name = axes.annotate(table.name(label), (0, top + _GAP - 8), fontsize=13, weight="bold", bbox=_BACKING)
    axes.annotate(table.threat(label), (1, 0), (10, 0), xycoords=name, color=svg.MUTED, bbox=_BACKING, **beside)
    for line, row in enumerate(table.rows):
        estimate, y = row.accuracies[label], top + _GAP + _ROW * (line + 0.5)
        low, value, high = (100 * part for part in (estimate.low, estimate.value, estimate.high))
        paint = svg.colour(row.run.number)
        axes.plot([low, high], [y, y], color=paint, alpha=0.45, linewidth=6, solid_capstyle="butt", clip_on=False)
        axes.plot(value, y, linestyle="", clip_on=False, **svg.line_style(row.run.number, 10))
        axes.annotate(percent(estimate.value), (100, y), (46, 0), va="center", ha="right", **beside)


def waterfall(row: TableRow, label: str) -> Markup:
    """Draw the accuracy after each attack of an ensemble; pale: the images that this attack fooled."""
    stages = [(name, after.value) for name, after in row.facts.stages(label).items()]
    columns = row.facts.columns
    before = float((row.facts.correct(label) | (columns[f"{label}/fooled_by"] >= 0)).mean())
    height = _STAGE * (1 + len(stages))
    with svg.panel(WIDTH, height + 42, left=2, right=8, top=2, bottom=40, grid="x") as axes:
        axes.set(xlim=(0, 100), ylim=(height, 0), xticks=range(0, 101, 20), yticks=[])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("images still classified right (%)")
        for position, (name, right) in enumerate([("clean images", before), *stages]):
            top = _STAGE * position
            paint: dict[str, Any] = {"height": 14, "color": svg.colour(row.run.number), "align": "edge"}
            axes.barh(top + 20, 100 * right, alpha=0.85, linewidth=0, **paint)
            axes.barh(top + 20, 100 * (before - right), left=100 * right, alpha=0.3, linewidth=0, **paint)
            axes.text(0, top + 15, name, fontsize=12, bbox=_BACKING)
            if before > right:
                lost = f"−{percent(before - right)}"
                axes.text(86, top + 15, lost, ha="right", fontsize=11, color=svg.MUTED, bbox=_BACKING)
            axes.text(100, top + 15, percent(right), ha="right", fontsize=12, bbox=_BACKING)
            before = right
        return svg.inline(axes, f"{row.name}: accuracy after each attack of {label}")


def curve_panel(chart: CurveChart, chance: float) -> Markup:
    """Draw all runs' accuracy over a radius, an image size or another axis; bands are 95 % intervals."""
    label = chart.xlabel or (f"radius ε ({norm_sign(chart.norm)})" if chart.norm else "image size (pixels)")
    with svg.panel(WIDTH, HEIGHT, left=34, right=14) as axes:
        axes.set_title(f"{chart.title}: accuracy (%)", x=-0.09, pad=14)
        for line in chart.lines:
            draw_line(axes, line, is_step=chart.is_step)
        axes.set(ylim=(0, 100), yticks=range(0, 101, 20), xlabel=label)
        axes.axhline(100 * chance, color=svg.MUTED, linewidth=1, linestyle=(0, (2, 3)))
        last = max(x for line in chart.lines for x in line.x)
        if chart.norm:
            axes.set_xlim(0, last or 1)
            radius_ticks(axes, chart.norm, last)
        elif not chart.xlabel:
            axes.set_xticks(sorted({x for line in chart.lines for x in line.x}))
        return svg.inline(axes, f"{chart.title}: accuracy over {label}")


def draw_line(axes: Axes, line: Line, *, is_step: bool) -> None:
    paint = svg.colour(line.number)
    low, value, high = (_percents(line.estimates, name) for name in ("low", "value", "high"))
    step: Any = {"step": "post"} if is_step else {}
    axes.fill_between(line.x, low, high, color=paint, alpha=0.15, linewidth=0, **step)
    if is_step:
        axes.step(line.x, value, where="post", color=paint, linewidth=2)
    else:
        axes.plot(line.x, value, linewidth=2, clip_on=False, **svg.line_style(line.number))


def _percents(estimates: Sequence[Estimate], name: str) -> list[float]:
    return [100 * float(getattr(each, name)) for each in estimates]


def radius_ticks(axes: Axes, norm: str, last: float) -> None:
    """Write ℓ∞ radii as multiples of 1/255."""
    if norm != "linf":
        return
    levels = 255 * last
    step = next((each for each in _LEVELS if levels / each <= 5), _LEVELS[-1])
    ticks = list(range(0, math.floor(levels + 1e-6) + 1, step))
    axes.set_xticks([tick / 255 for tick in ticks], [f"{tick}/255" if tick else "0" for tick in ticks])

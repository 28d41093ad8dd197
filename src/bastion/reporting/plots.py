"""Charts of accuracy (with intervals, after each attack of an ensemble, over radius or size) and of distances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from bastion.measuring.intervals import Estimate
from bastion.reporting import svg
from bastion.reporting.robustness_curves import CurveChart, Distances, Line
from bastion.reporting.tables import SharedTable, TableRow
from bastion.reporting.wording import norm_sign, percent

_BACKING = {"facecolor": svg.PAPER, "edgecolor": "none", "pad": 1}  # keeps grid lines out of text
_ROW, _GAP, _HEAD, _FOOT = 22, 34, 18, 40  # of the accuracy chart, in pixels
_STAGE = 40  # height of a stage of the waterfall
WIDTH, HEIGHT = 360, 260  # of a panel
_BINS = 24
_LEVELS = (1, 2, 4, 8, 16, 32, 64)  # between ticks of an ℓ∞ radius


def accuracy_chart(table: SharedTable, width: int, key: str) -> Markup:
    """Draw every run's accuracy under every probe as a dot on its 95 % interval."""
    block = _GAP + _ROW * len(table.rows)
    height = _HEAD + block * len(table.charted) + _FOOT
    with svg.figure(width, height) as figure:
        axes = svg.axes(figure, left=6, right=52, top=_HEAD, bottom=_FOOT)
        axes.set(xlim=(0, 100), ylim=(block * len(table.charted), 0), xticks=range(0, 101, 20), yticks=[])
        axes.grid(axis="x")
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
        return svg.inline(figure, key, f"Accuracy with 95 % intervals: {table.title}, n = {table.n}")


def _draw_probe(axes: Axes, table: SharedTable, label: str, top: float) -> None:
    """Draw the probe's name, then a line for each run with its number at the right edge."""
    beside: dict[str, Any] = {"textcoords": "offset points", "annotation_clip": False}
    name = axes.annotate(table.name(label), (0, top + _GAP - 8), fontsize=13, weight="bold", bbox=_BACKING)
    axes.annotate(table.threat(label), (1, 0), (10, 0), xycoords=name, color=svg.MUTED, bbox=_BACKING, **beside)
    for line, row in enumerate(table.rows):
        estimate, y = row.accuracies[label], top + _GAP + _ROW * (line + 0.5)
        low, value, high = (100 * part for part in (estimate.low, estimate.value, estimate.high))
        paint: dict[str, Any] = {"color": svg.colour(row.run.number), "clip_on": False}
        axes.plot([low, high], [y, y], alpha=0.45, linewidth=6, solid_capstyle="butt", **paint)
        axes.plot(value, y, svg.marker(row.run.number), markersize=10, markeredgecolor=svg.PAPER, **paint)
        axes.annotate(percent(estimate.value), (100, y), (46, 0), va="center", ha="right", **beside)


def waterfall(row: TableRow, label: str, key: str) -> Markup:
    """Draw the accuracy after each attack of an ensemble; pale: the images that this attack fooled."""
    stages = [(name, after.value) for name, after in row.facts.stages(label).items()]
    columns = row.facts.columns
    before = float((row.facts.correct(label) | (columns[f"{label}/fooled_by"] >= 0)).mean())
    with svg.figure(WIDTH, _STAGE * (1 + len(stages)) + 42) as figure:
        axes = svg.axes(figure, left=2, right=8, top=2, bottom=40)
        axes.set(xlim=(0, 100), ylim=(_STAGE * (1 + len(stages)), 0), xticks=range(0, 101, 20), yticks=[])
        axes.grid(axis="x")
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
        return svg.inline(figure, key, f"{row.name}: accuracy after each attack of {label}")


def curve_panel(chart: CurveChart, chance: float, key: str) -> Markup:
    """Draw all runs' accuracy over a radius, an image size or another axis; bands are 95 % intervals."""
    label = chart.xlabel or (f"radius ε ({norm_sign(chart.norm)})" if chart.norm else "image size (pixels)")
    with svg.figure(WIDTH, HEIGHT) as figure:
        axes = svg.axes(figure, left=34, right=14, top=30, bottom=44)
        head(axes, f"{chart.title}: accuracy (%)")
        for line in chart.lines:
            draw_line(axes, line, is_step=chart.is_step)
        axes.set(ylim=(0, 100), yticks=range(0, 101, 20))
        axes.set_xlabel(label)
        axes.axhline(100 * chance, color=svg.MUTED, linewidth=1, linestyle=(0, (2, 3)))
        last = max(x for line in chart.lines for x in line.x)
        if chart.norm:
            axes.set_xlim(0, last or 1)
            _radius_ticks(axes, chart.norm, last)
        elif not chart.xlabel:
            axes.set_xticks(sorted({x for line in chart.lines for x in line.x}))
        axes.grid(axis="y")
        return svg.inline(figure, key, f"{chart.title}: accuracy over {label}")


def head(axes: Axes, text: str) -> None:
    """Write the label of the y axis above it."""
    axes.set_ylabel(text, rotation=0, ha="left", color=svg.INK, fontsize=13)
    axes.yaxis.set_label_coords(-0.09, 1.06)


def draw_line(axes: Axes, line: Line, *, is_step: bool) -> None:
    paint = svg.colour(line.number)
    low, value, high = (_percents(line.estimates, name) for name in ("low", "value", "high"))
    step: Any = {"step": "post"} if is_step else {}
    axes.fill_between(line.x, low, high, color=paint, alpha=0.15, linewidth=0, **step)
    if is_step:
        axes.step(line.x, value, where="post", color=paint, linewidth=2)
    else:
        sign = {"marker": svg.marker(line.number), "markersize": 7, "markeredgecolor": svg.PAPER}
        axes.plot(line.x, value, color=paint, linewidth=2, clip_on=False, **sign)  # type: ignore[arg-type]


def _percents(estimates: Sequence[Estimate], name: str) -> list[float]:
    return [100 * float(getattr(each, name)) for each in estimates]


def _radius_ticks(axes: Axes, norm: str, last: float) -> None:
    """Write ℓ∞ radii as multiples of 1/255."""
    if norm != "linf":
        return
    levels = 255 * last
    step = next((each for each in _LEVELS if levels / each <= 5), _LEVELS[-1])
    ticks = list(range(0, math.floor(levels + 1e-6) + 1, step))
    axes.set_xticks([tick / 255 for tick in ticks], [f"{tick}/255" if tick else "0" for tick in ticks])


def distance_panel(label: str, shown: Sequence[Distances], key: str) -> Markup:
    """Draw the histogram of distances to the nearest adversarial example."""
    norm = shown[0].norm
    values = np.concatenate([each.found for each in shown])
    last = float(values.max(initial=0)) or 1.0
    with svg.figure(WIDTH, HEIGHT) as figure:
        axes = svg.axes(figure, left=34, right=14, top=30, bottom=44)
        head(axes, f"{label}: images")
        for each in shown:
            paint = svg.colour(each.number)
            counts, edges = np.histogram(each.found, bins=_BINS, range=(0, last))
            axes.stairs(counts, edges, fill=True, color=paint, alpha=0.2)
            axes.stairs(counts, edges, color=paint, linewidth=1.6)
        axes.set_xlim(0, last)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        _radius_ticks(axes, norm, last)
        axes.set_xlabel(f"distance of the nearest adversarial example ({norm_sign(norm)})")
        axes.grid(axis="y")
        return svg.inline(figure, key, f"{label}: distances of the nearest adversarial examples")

"""Histograms of several models on one axis. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from bastion.measuring.store import Column
from bastion.reporting import svg

WIDTH, HEIGHT = 360, 260
BINS = 32


@dataclass(frozen=True)
class Histogram:
    number: int  # of the run
    values: Column
    line: float  # a dashed line at a value to compare with, such as the mean
    point: float | None = None  # a triangle on the axis, such as the lowest


def histogram(shown: Sequence[Histogram], title: str, xlabel: str, key: str) -> Markup:
    """Draw the histograms of all models in one panel."""
    values = np.concatenate([each.values for each in shown] + [np.array([each.line for each in shown])])
    low, high = float(values.min()), float(values.max())
    with svg.figure(WIDTH, HEIGHT) as drawn:
        axes = svg.axes(drawn, left=38, right=14, top=34, bottom=44)
        axes.set_title(title, loc="left", x=-0.1, pad=10, fontsize=13)
        for each in shown:
            paint = svg.colour(each.number)
            counts, edges = np.histogram(each.values, bins=BINS, range=(low, high) if high > low else None)
            axes.stairs(counts, edges, fill=True, color=paint, alpha=0.2)
            axes.stairs(counts, edges, color=paint, linewidth=1.6)
            axes.axvline(each.line, color=paint, linewidth=1.6, linestyle=(0, (4, 3)))
            if each.point is not None:
                axes.plot(each.point, 0, "^", color=paint, markersize=10, markeredgecolor=svg.PAPER, clip_on=False)
        if high > low:
            axes.set_xlim(low, high)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.set_xlabel(xlabel)
        axes.grid(axis="y")
        return svg.inline(drawn, key, f"{title} by {xlabel}")

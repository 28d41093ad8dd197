"""Histograms of several models on one axis, such as of distances to adversarial examples. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from bastion.measuring.store import Column
from bastion.reporting import svg
from bastion.reporting.plots import HEIGHT, WIDTH, radius_ticks
from bastion.reporting.robustness_curves import Distances
from bastion.reporting.wording import norm_sign


@dataclass(frozen=True)
class Histogram:
    number: int  # of the run
    values: Column
    line: float | None = None  # a dashed line at a value to compare with, such as the mean
    point: float | None = None  # a triangle on the axis, such as the lowest


def histogram(
    shown: Sequence[Histogram], title: str, xlabel: str, *, bins: int = 32, norm: str | None = None
) -> Markup:
    """Draw the histograms of all models in one panel; lengths in a norm begin at 0."""
    others = [each.line for each in shown if each.line is not None] + ([] if norm is None else [0.0])
    values = np.concatenate([*(each.values for each in shown), others])
    low, high = float(values.min()), float(values.max())
    with svg.panel(WIDTH, HEIGHT, left=38, right=14, top=34) as axes:
        axes.set_title(title, x=-0.1, pad=10)
        for each in shown:
            paint = svg.colour(each.number)
            counts, edges = np.histogram(each.values, bins=bins, range=(low, high) if high > low else None)
            axes.stairs(counts, edges, fill=True, color=paint, alpha=0.2)
            axes.stairs(counts, edges, color=paint, linewidth=1.6)
            if each.line is not None:
                axes.axvline(each.line, color=paint, linewidth=1.6, linestyle=(0, (4, 3)))
            if each.point is not None:
                axes.plot(each.point, 0, "^", color=paint, markersize=10, markeredgecolor=svg.PAPER, clip_on=False)
        if high > low:
            axes.set_xlim(low, high)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        if norm is None:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        else:
            radius_ticks(axes, norm, high)
        axes.set_xlabel(xlabel)
        return svg.inline(axes, f"{title} by {xlabel}")


def distance_panel(label: str, shown: Sequence[Distances]) -> Markup:
    """Draw the histogram of distances to the nearest adversarial example."""
    norm = shown[0].norm
    xlabel = f"distance of the nearest adversarial example ({norm_sign(norm)})"
    found = [Histogram(each.number, each.found) for each in shown]
    return histogram(found, f"{label}: images", xlabel, bins=24, norm=norm)

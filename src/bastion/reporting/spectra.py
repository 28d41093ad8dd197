"""Frequency spectra of gradients and perturbations. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from bastion.measuring.facts import Facts
from bastion.measuring.intervals import Estimate
from bastion.measuring.measurement import MeasuredCase
from bastion.measuring.store import Column
from bastion.reporting import svg
from bastion.reporting.figures import fact
from bastion.reporting.plots import HEIGHT, WIDTH, draw_line
from bastion.reporting.robustness_curves import Line
from bastion.reporting.tables import SharedTable

HIGHEST = 0.5**0.5  # cycles per pixel, along the diagonal


def energy_panel(table: SharedTable, case: MeasuredCase, shape: Sequence[int] | None, title: str) -> Markup:
    """Draw the shares of energy in rings of frequencies; dotted: white noise on images of this shape."""
    columns = [fact(row, case, "energy") for row in table.rows]
    bins = columns[0].shape[1]
    centres = [(ring + 0.5) * HIGHEST / bins for ring in range(bins)]
    with svg.panel(WIDTH, HEIGHT, left=34, right=14) as axes:
        axes.set_title(f"{title} (%)", x=-0.09, pad=14)
        for row, column in zip(table.rows, columns, strict=True):
            draw_line(axes, Line(row.run.number, centres, by_ring(row.facts, column)), is_step=False)
        if shape is not None:
            flat = 100 * white_noise(shape[-2], shape[-1], bins)
            axes.plot(centres, flat, color=svg.MUTED, linewidth=1, linestyle=(0, (2, 3)))
        axes.set_xlim(0, HIGHEST)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("frequency (cycles per pixel)")
        return svg.inline(axes, f"{title} by frequency")


def by_ring(facts: Facts, energy: Column) -> list[Estimate]:
    """Return the mean share of each ring, over the examples that have any energy."""
    return [facts.estimate(column.astype(np.float64)) for column in energy.T]


def white_noise(height: int, width: int, bins: int) -> Column:
    """Return (bins,): each ring's share of all frequencies, with the rings of the probes' `energy_shares`."""
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)
    ring = (np.sqrt(rows**2 + columns**2) * (bins / HIGHEST) + 1e-9).astype(np.int64).clip(max=bins - 1)
    shares: Column = np.bincount(ring.ravel(), minlength=bins) / ring.size
    return shares

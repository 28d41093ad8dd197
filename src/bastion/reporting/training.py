"""Curves of the training log. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from bastion.measuring.store import Column
from bastion.reporting import svg
from bastion.reporting.tables import ReportedRun

POINTS = 300  # of a curve; longer ones are averaged

# Source of a curve: training batches, some training images after each epoch, or held-out images.
Form = Literal["batches", "seen", "held out"]


@dataclass(frozen=True)
class Curve:
    """One quantity of one run over its training."""

    number: int  # of the run
    epochs: Column
    values: Column
    form: Form


def training_panels(runs: Sequence[ReportedRun]) -> list[Markup]:
    """Draw loss, clean accuracy and accuracy under attack of all runs, if any run logged them."""
    loss = curves(runs, "loss", None, 1)
    clean = curves(runs, "clean_accuracy", "clean", 100)
    robust = curves(runs, "robust_accuracy", "robust", 100)
    top = min(100.0, 1.1 * max([10.0, *(curve.values.max() for curve in clean + robust)]))
    panels = (
        (loss, "training loss", None),
        (clean, "clean accuracy (%)", (0, top)),
        (robust, "accuracy under attack (%)", (0, top)),
    )
    return [_panel(drawn, label, limits) for drawn, label, limits in panels if drawn]


def _panel(drawn: Sequence[Curve], label: str, limits: tuple[float, float] | None) -> Markup:
    with svg.panel(360, 260, left=34, right=8, bottom=42) as axes:
        for curve in drawn:
            paint = {"color": svg.colour(curve.number)}
            looks: dict[Form, dict[str, Any]] = {
                "batches": {**paint, "linewidth": 1.6, "alpha": 0.75},
                "seen": {**paint, "linewidth": 1.6, "linestyle": (0, (4, 2))},
                "held out": {"linestyle": "", **svg.line_style(curve.number)},
            }
            axes.plot(curve.epochs, curve.values, clip_on=False, **looks[curve.form])
        axes.set_title(label, x=-0.08, pad=14)
        axes.set_xlabel("epoch")
        axes.set_xlim(left=0)
        if limits:
            axes.set_ylim(*limits)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        return svg.inline(axes, f"{label} over the epochs of training")


def curves(runs: Sequence[ReportedRun], step_key: str, accuracy: str | None, unit: float) -> list[Curve]:
    """Return the curves; lines come before points, so that points are drawn on top."""
    sources: list[tuple[str, str, Form]] = [("step", step_key, "batches")]
    if accuracy:
        sources += [("epoch", f"train_{accuracy}", "seen"), ("epoch", f"val_{accuracy}", "held out")]
    found = [
        Curve(run.number, *averaged(*_series(run, kind, key, unit)), form)
        for kind, key, form in sources
        for run in runs
    ]
    return [curve for curve in found if len(curve.values)]


def _series(run: ReportedRun, kind: str, key: str, unit: float) -> tuple[Column, Column]:
    """Return epochs and values, without missing or non-finite ones."""
    logged = [(record.get("epoch"), record.get(key)) for record in run.records(kind)]
    pairs = [pair for pair in logged if all(isinstance(value, int | float) for value in pair)]
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    table = table[np.isfinite(table).all(axis=1)]
    return table[:, 0], unit * table[:, 1]


def averaged(epochs: Column, values: Column) -> tuple[Column, Column]:
    """Average over equal intervals, at most `POINTS` of them."""
    if len(values) <= POINTS:
        return epochs, values
    means = [np.array([part.mean() for part in np.array_split(column, POINTS)]) for column in (epochs, values)]
    return means[0], means[1]

"""Charts as inline SVG with the page's own colours and fonts: they follow light, dark and print. No torch."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from xml.etree import ElementTree

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bastion.measuring.store import Column
from bastion.reporting.tables import Comparison, ReportedRun, percent

COLOURS = 8
MARKERS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼"}  # matplotlib's name and the legend's sign
POINTS = 300  # a longer curve is averaged down to so many

# matplotlib draws with stand-ins, which `_inline` replaces by the page's variables.
_INK, _MUTED, _GRID, _PAPER = "#000001", "#000002", "#000003", "#000004"
_RUNS = [f"#0001{position:02x}" for position in range(COLOURS)]
_VARIABLES = {_INK: "--ink", _MUTED: "--muted", _GRID: "--line", _PAPER: "--paper"} | {
    colour: f"--run-{position}" for position, colour in enumerate(_RUNS)
}
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "bastion",  # the same facts give the same page
    "text.parse_math": False,  # a name may hold a dollar sign
    "font.size": 12,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.facecolor": "none",
    "axes.labelcolor": _MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
    "figure.facecolor": "none",
}
_BACKING = {"facecolor": _PAPER, "edgecolor": "none", "pad": 1}  # keeps grid lines out of the words
_ROW, _GAP, _HEAD, _FOOT = 22, 34, 16, 40  # of the accuracy chart, in pixels


# What a curve shows: training batches as they come, some training images after an epoch, or held-out ones.
Form = Literal["batches", "seen", "held out"]


@dataclass(frozen=True)
class Curve:
    """One quantity of one run over its training."""

    mark: int
    epochs: Column
    values: Column
    form: Form


def marker(mark: int) -> str:
    return list(MARKERS)[mark % len(MARKERS)]


def colour(mark: int) -> str:
    return _RUNS[mark % COLOURS]


def accuracy_chart(comparison: Comparison, width: int, key: str) -> Markup:
    """Every run's accuracy under every probe as a dot on its 95 % interval."""
    block = _GAP + _ROW * len(comparison.rows)
    height = _HEAD + block * len(comparison.columns) + _FOOT
    with _figure(width, height) as figure:
        axes = _axes(figure, left=6, right=34, top=_HEAD, bottom=_FOOT)
        axes.set(xlim=(0, 100), ylim=(block * len(comparison.columns), 0), xticks=range(0, 101, 20), yticks=[])
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("images classified right (%)")
        axes.axvline(100 * comparison.chance, color=_MUTED, linewidth=1, linestyle=(0, (2, 3)))
        axes.text(100 * comparison.chance, -4, "chance", color=_MUTED, ha="center", fontsize=11)
        for position, label in enumerate(comparison.columns):
            _draw_probe(axes, comparison, label, block * position)
        title = f"Accuracy with 95 % intervals: {comparison.title}, n = {comparison.n}"
        return _inline(figure, key, title)


def _draw_probe(axes: Axes, comparison: Comparison, label: str, top: float) -> None:
    """The probe's name, then a line for each run."""
    beside: dict[str, Any] = {"textcoords": "offset points", "annotation_clip": False, "bbox": _BACKING}
    name = axes.annotate(label, (0, top + _GAP - 8), fontsize=13, weight="bold", bbox=_BACKING)
    axes.annotate(comparison.threat(label), (1, 0), (10, 0), xycoords=name, color=_MUTED, **beside)
    for line, row in enumerate(comparison.rows):
        estimate, y = row.accuracies[label], top + _GAP + _ROW * (line + 0.5)
        low, value, high = (100 * part for part in (estimate.low, estimate.value, estimate.high))
        paint: dict[str, Any] = {"color": colour(row.run.mark), "clip_on": False}
        axes.plot([low, high], [y, y], alpha=0.45, linewidth=6, solid_capstyle="butt", **paint)
        axes.plot(value, y, marker(row.run.mark), markersize=10, markeredgecolor=_PAPER, **paint)
        axes.annotate(percent(estimate.value), (high, y), (9, 0), va="center", **beside)


def training_panels(runs: Sequence[ReportedRun]) -> list[Markup]:
    """Loss, clean accuracy and accuracy under attack, all runs in each; what no run logged is left out."""
    loss = curves(runs, "loss", None, 1)
    clean = curves(runs, "clean_accuracy", "clean", 100)
    robust = curves(runs, "robust_accuracy", "robust", 100)
    top = min(100.0, 1.1 * max([10.0, *(curve.values.max() for curve in clean + robust)]))
    panels = (
        (loss, "training loss", None, "training-loss"),
        (clean, "clean accuracy (%)", (0, top), "training-clean"),
        (robust, "accuracy under attack (%)", (0, top), "training-robust"),
    )
    return [_panel(drawn, label, limits, key) for drawn, label, limits, key in panels if drawn]


def _panel(drawn: Sequence[Curve], label: str, limits: tuple[float, float] | None, key: str) -> Markup:
    with _figure(360, 260) as figure:
        axes = _axes(figure, left=30, right=8, top=30, bottom=42)
        for curve in drawn:
            looks: dict[Form, dict[str, Any]] = {
                "batches": {"linewidth": 1.6, "alpha": 0.75},
                "seen": {"linewidth": 1.6, "linestyle": (0, (4, 2))},
                "held out": {"linestyle": "", "marker": marker(curve.mark), "markersize": 7, "markeredgecolor": _PAPER},
            }
            axes.plot(curve.epochs, curve.values, color=colour(curve.mark), clip_on=False, **looks[curve.form])
        axes.set_xlabel("epoch")
        axes.set_ylabel(label, rotation=0, ha="left", color=_INK, fontsize=13)
        axes.yaxis.set_label_coords(-0.08, 1.06)
        axes.set_xlim(left=0)
        if limits:
            axes.set_ylim(*limits)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.grid(axis="y")
        return _inline(figure, key, f"{label} over the epochs of training")


def curves(runs: Sequence[ReportedRun], step_key: str, accuracy: str | None, unit: float) -> list[Curve]:
    """Lines before points, so that points are drawn on top."""
    sources: list[tuple[str, str, Form]] = [("step", step_key, "batches")]
    if accuracy:
        sources += [("epoch", f"train_{accuracy}", "seen"), ("epoch", f"val_{accuracy}", "held out")]
    found = [
        Curve(run.mark, *averaged(*_series(run, kind, key, unit)), form) for kind, key, form in sources for run in runs
    ]
    return [curve for curve in found if len(curve.values)]


def _series(run: ReportedRun, kind: str, key: str, unit: float) -> tuple[Column, Column]:
    """Epochs and values, without what was not logged or is not finite."""
    pairs = [(record["epoch"], record[key]) for record in run.records(kind) if record.get(key) is not None]
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    table = table[np.isfinite(table).all(axis=1)]
    return table[:, 0], unit * table[:, 1]


def averaged(epochs: Column, values: Column) -> tuple[Column, Column]:
    """Means over equal stretches, at most `POINTS` of them."""
    if len(values) <= POINTS:
        return epochs, values
    means = [np.array([part.mean() for part in np.array_split(column, POINTS)]) for column in (epochs, values)]
    return means[0], means[1]


@contextmanager
def _figure(width: int, height: int) -> Iterator[Figure]:
    """A figure measured in CSS pixels."""
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # The browser has the fonts for any name; matplotlib, which only measures, may not.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield Figure(figsize=(width / 72, height / 72), dpi=72)


def _axes(figure: Figure, *, left: int, right: int, top: int, bottom: int) -> Axes:
    width, height = 72 * figure.get_size_inches()
    return figure.add_axes((left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height))


def _inline(figure: Figure, key: str, title: str) -> Markup:
    """The figure as an element of the page: page colours, ids of its own, no namespaces, a title."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ElementTree.fromstring(file.getvalue())
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(name): _adapt(name, value, key) for name, value in element.attrib.items()}
    for element in root.findall(".//defs"):
        for sheet in element.findall("style"):
            element.remove(sheet)  # it would style the whole page
    width, height = (round(72 * side) for side in figure.get_size_inches())
    root.attrib = {"viewBox": f"0 0 {width} {height}", "style": f"max-width: {width}px", "role": "img"}
    root.attrib["aria-label"] = title
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _adapt(name: str, value: str, key: str) -> str:
    if name == "style":
        return re.sub("#0000[0-9a-f]{2}|#0001[0-9a-f]{2}", lambda match: f"var({_VARIABLES[match[0]]})", value)
    if name == "id":
        return f"{key}-{value}"
    if _local(name) in ("href", "clip-path"):
        return value.replace("#", f"#{key}-")
    return value

"""Accuracy over occlusion masks (Guo et al. 2023, Fig. 2), confidence in single images, and the occluded patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

from bastion.measuring.facts import SHARE
from bastion.measuring.measurement import MeasuredCase
from bastion.reporting import strips, svg
from bastion.reporting.figures import Figure, Table, fact, figures
from bastion.reporting.histograms import Histogram, histogram
from bastion.reporting.tables import SharedTable, TableRow
from bastion.reporting.wording import percent, with_interval

WIDTH, ROW = 360, 44
MANY = 50  # masks for a histogram of a single image
EXAMPLES, PICTURES = 2, 8


@figures.register("occlusion")
def occlusion(table: SharedTable, cases: Sequence[MeasuredCase]) -> list[Figure]:
    several = [case for case in cases if _masks(table.rows[0], case) > 1]
    found = [_accuracies(table, several)] if several else []
    found += [_confidences(table, case) for case in several if _masks(table.rows[0], case) >= MANY]
    return found + [figure for case in cases if (figure := _pictures(table, case))]


def _masks(row: TableRow, case: MeasuredCase) -> int:
    return int(fact(row, case, "right_by_mask").shape[1])


def _accuracies(table: SharedTable, cases: Sequence[MeasuredCase]) -> Figure:
    boxed = cases if table.n > 1 else []  # a single image has no accuracy to draw
    return Figure(
        "Accuracy over occlusion masks",
        [_boxes(table, case) for case in boxed],
        "Each box is of accuracies on all images, one for each mask: median, quartiles, and whiskers to the furthest "
        "value within 1.5 times their distance. A star is the accuracy on clean images, a number the mean over masks. "
        "Every image has masks of its own, so boxes get narrower, and deviations smaller with more images; the "
        "last two columns of the table do not. Masks of a corruption model differ in their noise alone.",
        _table(table, cases),
    )


def _boxes(table: SharedTable, case: MeasuredCase) -> Markup:
    """Fig. 2, right: a horizontal box plot for each model."""
    with svg.panel(WIDTH, ROW * len(table.rows) + 76, left=6, right=52, bottom=46, grid="x") as axes:
        axes.set_title(case.label)
        for line, row in enumerate(table.rows):
            _draw_box(axes, line, row, case)
        axes.set(ylim=(len(table.rows) - 0.5, -0.5), yticks=[])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(f"images classified right (%), {_masks(table.rows[0], case)} masks")
        return svg.inline(axes, f"{case.label}: accuracy over occlusion masks, by model")


def _draw_box(axes: Axes, line: int, row: TableRow, case: MeasuredCase) -> None:
    """A box plot of accuracies over masks, with the clean accuracy as a star and the mean at the right edge."""
    paint: dict[str, Any] = {"color": svg.colour(row.run.number)}
    accuracies = 100 * fact(row, case, "right_by_mask").mean(0)
    axes.boxplot(
        accuracies,
        positions=[line],
        widths=0.5,
        orientation="horizontal",
        patch_artist=True,
        boxprops={"facecolor": paint["color"], "alpha": 0.4, "linewidth": 0},
        medianprops={**paint, "linewidth": 2.5},
        whiskerprops=paint,
        capprops=paint,
        flierprops={"marker": ".", "markersize": 5, "markeredgecolor": paint["color"]},
    )
    clean = 100 * float(fact(row, case, "clean_correct").mean())
    axes.plot(clean, line, "*", markersize=15, markeredgecolor=svg.PAPER, clip_on=False, **paint)
    edge: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "annotation_clip": False}
    mean = f"{accuracies.mean():.1f}"
    axes.annotate(mean, (1, line), (46, 0), textcoords="offset points", ha="right", va="center", **edge)


def _table(table: SharedTable, cases: Sequence[MeasuredCase]) -> Table:
    rows = []
    for case in cases:
        for row in table.rows:
            right = fact(row, case, "right_by_mask")
            accuracies = right.mean(0)
            always, ever = float(right.all(1).mean()), float(right.any(1).mean())
            name = f"{row.name}, {case.label}" if len(cases) > 1 else row.name
            cells = [
                f"{percent(float(fact(row, case, 'clean_correct').mean()))} %",
                with_interval(row.facts.estimate(fact(row, case, "share_right"), SHARE)),
                f"{100 * accuracies.std(ddof=1):.2f} points",
                f"{percent(accuracies.min())} to {percent(accuracies.max())} %",
                f"{percent(always)} %",
                f"{percent(ever - always)} %",
            ]
            rows.append((name, cells))
    masks = ["mean over masks", "standard deviation", "lowest to highest mask"]
    return Table(["run", "clean", *masks, "right under all", "depends on the mask"], rows)


def _confidences(table: SharedTable, case: MeasuredCase) -> Figure:
    """Histograms of the confidence in the first images, each under many masks."""
    panels = []
    for place, name in enumerate(strips.first_images(table, case, EXAMPLES)):
        shown = [
            Histogram(
                row.run.number,
                fact(row, case, "confidence_by_mask")[place].astype(np.float64),
                float(fact(row, case, "clean_confidence")[place]),
            )
            for row in table.rows
        ]
        panels.append(histogram(shown, f"{name}: masks", "probability of the true class"))
    return Figure(
        f"{case.label}: one image under {_masks(table.rows[0], case)} masks",
        panels,
        "How often the true class gets which probability. The dashed line is the clean image.",
    )


def _pictures(table: SharedTable, case: MeasuredCase) -> Figure | None:
    """Fig. 6: occluded images, with the confidence of each model."""
    first = strips.shared_pictures(table, case, PICTURES)
    if not len(first.positions):
        return None
    learned = case.spec.get("corruption_model")
    columns = {
        "clean": [fact(row, case, "clean_confidence") for row in table.rows],
        "occluded": [fact(row, case, "confidence_by_mask")[:, 0] for row in table.rows],
    }
    rows = [
        (
            name,
            [
                strips.image_tile(
                    first.rows[0][name][number],
                    f"Image of {truth}, {name}",
                    strips.percentages(table, [column[place] for column in confidences]),
                )
                for number, (place, truth) in enumerate(zip(first.row_numbers, first.truths, strict=True))
            ],
        )
        for name, confidences in columns.items()
    ]
    title = f"{case.label}: patches that the corruption model picks" if learned else f"{case.label}: occluded images"
    strip = strips.table(first.truths, rows, "", title)
    source = f"Picked by the corruption model of {learned}." if learned else "Patches are random."
    return Figure(
        title,
        [strip],
        f"{source} Under each picture is the probability that a model gives the true class.",
        wraps=True,
    )

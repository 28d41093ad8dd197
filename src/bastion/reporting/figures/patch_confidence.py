"""Confidence in the true class with some patches attacked, noisy or occluded (Guo et al. 2023, Fig. 1)."""

from __future__ import annotations

import math

from markupsafe import Markup

from bastion.measuring.facts import SHARE
from bastion.measuring.intervals import Estimate
from bastion.measuring.measurement import MeasuredCase
from bastion.reporting import strips, svg
from bastion.reporting.figures import Figure, Table, by_case, fact, figures
from bastion.reporting.pictures import run_mark
from bastion.reporting.tables import SharedTable, TableRow
from bastion.reporting.wording import percent, with_interval

WIDTH, HEIGHT = 360, 280
CHANGES = ("clean", "adversarial", "noisy", "occluded")
EXAMPLES = 3
FEW = 3  # with more models, bars have no room for numbers


@figures.register("patch-confidence")
@by_case
def patch_confidence(table: SharedTable, case: MeasuredCase) -> list[Figure]:
    means = f"Means over {table.n} images with 95 % intervals"
    caption = f"{means}; the same patches are attacked by PGD, noisy or occluded."
    title = f"{case.label}: confidence in the true class"
    return [Figure(title, [_bars(table, case)], caption, _table(table, case)), *_pictures(table, case)]


def _names(case: MeasuredCase) -> dict[str, str]:
    steps, sigma = case.spec.get("steps", 5), case.spec.get("sigma", 0.38)
    return dict(zip(CHANGES, ("clean", f"PGD-{steps}", f"Gaussian σ {sigma:g}", "occluded"), strict=True))


def _estimate(row: TableRow, case: MeasuredCase, change: str) -> Estimate:
    return row.facts.estimate(fact(row, case, f"{change}_confidence"), SHARE)


def _bars(table: SharedTable, case: MeasuredCase) -> Markup:
    names, count = _names(case), len(table.rows)
    width = 0.76 / count
    with svg.panel(WIDTH, HEIGHT, left=38, right=8) as axes:
        axes.set_title("probability of the true class (%)", x=-0.1)
        for line, row in enumerate(table.rows):
            colour = svg.colour(row.run.number)
            for place, change in enumerate(CHANGES):
                shown, x = _estimate(row, case, change), place + (line - (count - 1) / 2) * width
                axes.bar(x, 100 * shown.value, 0.9 * width, color=colour, alpha=0.55)
                axes.plot([x, x], [100 * shown.low, 100 * shown.high], color=colour, linewidth=2)
                if count <= FEW:
                    top = shown.high if math.isfinite(shown.high) else shown.value  # one image has no interval
                    axes.annotate(
                        percent(shown.value),
                        (x, 100 * top),
                        (0, 3),
                        textcoords="offset points",
                        ha="center",
                        fontsize=11,
                    )
        axes.set(
            xticks=range(len(CHANGES)),
            xticklabels=[name.replace(" ", "\n", 1) for name in names.values()],
            xlim=(-0.5, len(CHANGES) - 0.5),
        )
        axes.set_ylim(0, 1.12 * max(axes.get_ylim()[1], 1))
        axes.tick_params(axis="x", length=0, labelcolor=svg.INK)
        return svg.inline(axes, f"{case.label}: probability of the true class by change of the patches")


def _table(table: SharedTable, case: MeasuredCase) -> Table:
    rows = []
    for row in table.rows:
        shown = [_estimate(row, case, change) for change in CHANGES]
        rows.append((row.name, [with_interval(each) for each in shown]))
    return Table(["run", *_names(case).values()], rows)


def _pictures(table: SharedTable, case: MeasuredCase) -> list[Figure]:
    """The first images as each model got them; adversarial patches differ between models."""
    first, names = strips.shared_pictures(table, case, EXAMPLES), _names(case)
    if not len(first.positions):
        return []
    panels = []
    for row, pictures in zip(table.rows, first.rows, strict=True):
        confidences = {change: fact(row, case, f"{change}_confidence") for change in CHANGES}
        rows = [
            (
                truth,
                [
                    strips.image_tile(
                        pictures[change][number],
                        f"Image of {truth}, {names[change]}",
                        f"{percent(float(confidences[change][place]))} %",
                    )
                    for change in CHANGES
                ],
            )
            for number, (place, truth) in enumerate(zip(first.row_numbers, first.truths, strict=True))
        ]
        title = Markup("{} {}").format(run_mark(row.run.number), row.name)
        panels.append(strips.table(list(names.values()), rows, title, f"{case.label}, pictures of {row.name}"))
    caption = "Under each picture is the probability of the true class."
    return [Figure(f"{case.label}: the images", panels, caption, legend=False, wraps=True)]

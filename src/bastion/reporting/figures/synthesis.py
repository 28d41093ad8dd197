"""Images that were made for a class, and who recognises it."""

from __future__ import annotations

from collections.abc import Sequence

from bastion.measuring.facts import MeasuredCase
from bastion.reporting.figures import Figure, Table, figures
from bastion.reporting.gallery import EXAMPLES, judged, side_by_side
from bastion.reporting.grids import class_name
from bastion.reporting.pictures import Picture, data_uri, grid, to_bytes
from bastion.reporting.tables import Comparison
from bastion.reporting.wording import share_cell

COLUMNS = 4


@figures.register("synthesis")
def synthesis(comparison: Comparison, cases: Sequence[MeasuredCase], key: str) -> list[Figure]:
    return [made for case in cases for made in (*_gallery(comparison, case), _table(comparison, case))]


def _gallery(comparison: Comparison, case: MeasuredCase) -> list[Figure]:
    """What the search began with, and what it made of it for each model."""
    positions, kept = side_by_side(comparison, case.label)
    positions, classes = positions[:EXAMPLES], comparison.about.classes
    if not len(positions):
        return []
    labels = comparison.rows[0].facts.at(case.label, "label", positions)
    of_images = case.spec.get("start") == "image"
    starts = [
        Picture(data_uri(to_bytes(image)), class_name(classes, label) if of_images else "")
        for image, label in zip(kept[0]["start"][:EXAMPLES], labels, strict=True)
    ]
    panels = [grid(None, "start", starts, columns=COLUMNS, about="Start")]
    for row, each in zip(comparison.rows, kept, strict=True):
        target, success = (row.facts.at(case.label, name, positions) for name in ("target", "success"))
        made = [
            judged(image, class_name(classes, wanted), right=bool(reached), remark="")
            for image, wanted, reached in zip(each["synthesised"][:EXAMPLES], target, success, strict=True)
        ]
        panels.append(grid(row.run.mark, row.name, made, columns=COLUMNS, about=f"Made for {row.name}"))
    caption = "Below a picture is the class that was asked for: ✓ if the model predicts it."
    return [Figure(f"Images made for a class ({case.label})", panels, caption, legend=False)]


def _table(comparison: Comparison, case: MeasuredCase) -> Figure:
    rows = []
    for row in comparison.rows:
        facts, recognised = row.facts, row.facts.columns.get(f"{case.label}/recognised")
        columns = [facts.columns[f"{case.label}/{name}"] for name in ("success", "confidence")]
        others = [] if recognised is None else list(recognised.T)
        rows.append((row.name, [share_cell(facts.estimate(column)) for column in (*columns, *others)]))
    names = ["made for", "predicted by it", "its confidence", *case.spec.get("classifiers", ())]
    caption = "The share of images whose target is predicted by the model they were made for, and by others."
    title = f"Images made for a class ({case.label}): who recognises it"
    return Figure(title, caption=caption, table=Table(names, rows))

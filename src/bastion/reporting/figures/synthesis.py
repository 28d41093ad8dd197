"""Images synthesised for a class, and which models recognise it."""

from __future__ import annotations

from collections.abc import Mapping

from bastion.measuring.facts import SHARE
from bastion.measuring.measurement import MeasuredCase
from bastion.measuring.store import Column
from bastion.reporting.figures import Figure, Table, by_case, fact, figures
from bastion.reporting.gallery import predicted_picture, side_by_side
from bastion.reporting.grids import class_name
from bastion.reporting.pictures import Picture, data_uri, grid, rescaled_by_std, to_bytes
from bastion.reporting.tables import SharedTable, TableRow
from bastion.reporting.wording import share_cell

EXAMPLES = 6
COLUMNS = ("start", "made", "change")


@figures.register("synthesis")
@by_case
def synthesis(table: SharedTable, case: MeasuredCase) -> list[Figure]:
    """Start and result of the synthesis for each model, and which models recognise the class."""
    return [*_gallery(table, case), _table(table, case)]


def _gallery(table: SharedTable, case: MeasuredCase) -> list[Figure]:
    positions, kept = side_by_side(table, case.label)
    if not len(positions):
        return []
    panels = []
    for row, each in zip(table.rows, kept, strict=True):
        pictures = [made for place in range(len(positions[:EXAMPLES])) for made in _pictures(row, case, each, place)]
        panels.append(grid(row.run.number, row.name, pictures, columns=COLUMNS, about=f"{case.label} for {row.name}"))
    caption = (
        "Below a made image is the class that was asked for: ✓ if the model predicts it. "
        "The change is drawn from −3 to +3 of its standard deviations: grey is none."
    )
    return [Figure(f"Images made for a class ({case.label})", panels, caption, legend=False)]


def _pictures(row: TableRow, case: MeasuredCase, kept: Mapping[str, Column], place: int) -> list[Picture]:
    """A row of the grid."""
    here, classes = kept["position"][place : place + 1], row.facts.about.classes
    names = ("label", "target", "success")
    label, target, success = (row.facts.at(case.label, name, here)[0] for name in names)
    start, made = kept["start"][place], kept["synthesised"][place]
    return [
        Picture(data_uri(to_bytes(start)), class_name(classes, label) if case.spec.get("start") == "image" else ""),
        predicted_picture(made, class_name(classes, target), right=bool(success), remark=""),
        Picture(data_uri(rescaled_by_std(made - start))),
    ]


def _table(table: SharedTable, case: MeasuredCase) -> Figure:
    rows = []
    for row in table.rows:
        columns = [fact(row, case, name) for name in ("success", "confidence")]
        columns += list(fact(row, case, "recognised").T) if "recognised" in case.columns else []
        rows.append((row.name, [share_cell(row.facts.estimate(column, SHARE)) for column in columns]))
    names = ["made for", "predicted by it", "its confidence", *case.spec.get("classifiers", ())]
    caption = "The share of images whose target is predicted by the model they were made for, and by others."
    title = f"Images made for a class ({case.label}): who recognises it"
    return Figure(title, caption=caption, table=Table(names, rows))

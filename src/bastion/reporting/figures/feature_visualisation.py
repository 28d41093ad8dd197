"""Images that maximise units of a model."""

from __future__ import annotations

from bastion.measuring.measurement import MeasuredCase
from bastion.reporting.figures import Figure, by_case, fact, figures
from bastion.reporting.grids import class_name
from bastion.reporting.pictures import Picture, data_uri, grid
from bastion.reporting.tables import SharedTable, TableRow

COLUMNS = 4


@figures.register("feature-visualisation")
@by_case
def feature_visualisation(table: SharedTable, case: MeasuredCase) -> list[Figure]:
    """A grid for each model, and the images that the search began with, if they are images."""
    panels = [
        grid(row.run.number, row.name, _pictures(row, case), columns=COLUMNS, about=f"Excites a unit of {row.name}")
        for row in table.rows
    ]
    if case.spec.get("start") == "image":
        first = fact(table.rows[0], case, "start")
        starts = [Picture(data_uri(image)) for image in first]
        panels.insert(0, grid(None, "start", starts, columns=COLUMNS, about="Start"))
    caption = "Below a picture is the unit, and its activation at the start and at the end of the search."
    return [Figure(f"Images that excite units ({case.label})", panels, caption, legend=False)]


def _pictures(row: TableRow, case: MeasuredCase) -> list[Picture]:
    columns = [fact(row, case, name) for name in ("image", "unit", "before", "activation")]
    made = []
    for image, unit, before, after in zip(*columns, strict=True):
        name = class_name(row.facts.about.classes, unit) if case.spec.get("layer") == "logits" else unit
        made.append(Picture(data_uri(image), f"{name}\n{before:.2g} → {after:.2g}".replace("-", "−")))
    return made

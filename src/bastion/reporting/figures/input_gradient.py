"""Input gradients as images, their energy by frequency, and their alignment with the image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from bastion.measuring.measurement import MeasuredCase
from bastion.measuring.store import Column
from bastion.reporting.figures import Figure, Table, by_case, fact, figures
from bastion.reporting.gallery import side_by_side
from bastion.reporting.histograms import Histogram, histogram
from bastion.reporting.pictures import Picture, data_uri, grey, grid, rescaled_by_std, to_bytes
from bastion.reporting.spectra import energy_panel
from bastion.reporting.tables import SharedTable
from bastion.reporting.wording import quantity_cell

EXAMPLES = 6
COLUMNS = ("image", "gradient", "in grey")
MEASURES = {"alignment": "|⟨x, g⟩| / ‖g‖", "cosine": "|cos(x, g)|", "correlation": "|correlation|", "norm": "‖g‖₂"}


@figures.register("input-gradient")
@by_case
def input_gradient(table: SharedTable, case: MeasuredCase) -> list[Figure]:
    positions, kept = side_by_side(table, case.label)
    shape = kept[0]["clean"].shape if len(positions) else None
    panels = [energy_panel(table, case, shape, "energy of the gradient"), _histogram(table, case)]
    caption = "Left: mean shares of the energy in rings of frequencies; dotted: white noise. Right: dashed are means."
    numbers = Figure(f"Input gradients ({case.label})", panels, caption, _table(table, case))
    return [_gallery(table, case, kept), numbers] if len(positions) else [numbers]


def _gallery(table: SharedTable, case: MeasuredCase, kept: Sequence[dict[str, Column]]) -> Figure:
    panels = []
    for row, each in zip(table.rows, kept, strict=True):
        pictures = []
        for image, gradient in zip(each["clean"][:EXAMPLES], each["gradient"][:EXAMPLES], strict=True):
            drawn = rescaled_by_std(gradient)
            pictures += [Picture(data_uri(made)) for made in (to_bytes(image), drawn, grey(drawn))]
        panels.append(grid(row.run.number, row.name, pictures, columns=COLUMNS, about=f"{case.label} of {row.name}"))
    caption = "Gradients are drawn from −3 to +3 of their standard deviations: grey is zero."
    return Figure(f"Input gradients as pictures ({case.label})", panels, caption, legend=False)


def _histogram(table: SharedTable, case: MeasuredCase) -> Markup:
    columns = [(row, fact(row, case, "correlation")) for row in table.rows]
    found = [(row, column[np.isfinite(column)]) for row, column in columns]
    shown = [Histogram(row.run.number, values, float(values.mean())) for row, values in found if len(values)]
    return histogram(shown, "images", "|correlation| of image and gradient") if shown else Markup()


def _table(table: SharedTable, case: MeasuredCase) -> Table:
    rows = [
        (row.name, [quantity_cell(row.facts.estimate(fact(row, case, name))) for name in MEASURES])
        for row in table.rows
    ]
    return Table(["mean, 95 % interval", *MEASURES.values()], rows)

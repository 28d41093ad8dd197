"""Perturbations as images, by frequency, and as classified by models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bastion.measuring.measurement import MeasuredCase
from bastion.measuring.store import Column
from bastion.reporting.figures import Figure, Table, by_case, fact, figures
from bastion.reporting.gallery import choose, pixel_scale, predicted_picture, side_by_side
from bastion.reporting.grids import class_name
from bastion.reporting.pictures import Picture, data_uri, grey, grid, rescaled
from bastion.reporting.spectra import energy_panel
from bastion.reporting.tables import SharedTable, TableRow
from bastion.reporting.wording import percent, share_cell

EXAMPLES = 6
COLUMNS = ("clean", "adversarial", "perturbation", "in grey")


@figures.register("perturbation")
@by_case
def perturbation(table: SharedTable, case: MeasuredCase) -> list[Figure]:
    """Perturbations of the same images for all models, their energy by frequency, and which models recognise them."""
    positions, kept = side_by_side(table, case.label)
    shape = kept[0]["clean"].shape if len(positions) else None
    about = f"{case.label}, {case.threat}"
    shown = [
        Figure(
            f"Perturbations by frequency ({about})",
            [energy_panel(table, case, shape, "energy of δ")],
            "Mean share of the energy in rings of frequencies. Dotted: white noise.",
        ),
        *(_table(table, case, top) for top in (1, 5)),
    ]
    return [_gallery(table, case, positions, kept, about), *shown] if len(positions) else shown


def _gallery(
    table: SharedTable, case: MeasuredCase, positions: Column, kept: Sequence[dict[str, Column]], about: str
) -> Figure:
    """The same images for all rows, first those that most models classify right."""
    right = [
        row.facts.at(case.label, "before", positions) == row.facts.at(case.label, "label", positions)
        for row in table.rows
    ]
    chosen = choose(np.sum(right, axis=0))[:EXAMPLES]
    deltas = [each["adversarial"][chosen] - each["clean"][chosen] for each in kept]
    scale, text = pixel_scale(case.threat, np.stack(deltas))
    panels = [
        grid(
            row.run.number,
            row.name,
            [picture for place in chosen for picture in _pictures(row, case.label, each, place, scale)],
            columns=COLUMNS,
            about=f"{case.label} on {row.name}",
        )
        for row, each in zip(table.rows, kept, strict=True)
    ]
    caption = (
        f"Perturbations δ are drawn as (δ + ε) / 2ε with {text}: grey is no change. "
        "Below an image is what the model sees in it."
    )
    return Figure(f"Perturbations as pictures ({about})", panels, caption, legend=False)


def _pictures(row: TableRow, label: str, kept: Mapping[str, Column], place: int, scale: float) -> list[Picture]:
    """A row of the grid."""
    here = kept["position"][place : place + 1]
    truth, before, after = (row.facts.at(label, name, here)[0] for name in ("label", "before", "prediction"))
    names = [class_name(row.facts.about.classes, number) for number in (truth, before, after)]
    clean, adversarial = kept["clean"][place], kept["adversarial"][place]
    drawn = rescaled(adversarial - clean, scale)
    return [
        predicted_picture(clean, names[1], right=bool(before == truth), remark=f"is {names[0]}"),
        predicted_picture(adversarial, names[2], right=bool(after == truth), remark=""),
        Picture(data_uri(drawn)),
        Picture(data_uri(grey(drawn))),
    ]


def _table(table: SharedTable, case: MeasuredCase, top: int) -> Figure:
    """Rows are the attacked models, with both signs of δ; columns are the classifiers."""
    rows = []
    for row in table.rows:
        for sign, suffix in (("δ", ""), ("−δ", "_negative")):
            seen = fact(row, case, f"top{top}{suffix}")
            rows.append((f"{row.name}, {sign}", [share_cell(row.facts.estimate(column)) for column in seen.T]))
    classes = len(table.about.classes)
    caption = (
        f"The share of pictures (δ + ε) / 2ε, and (ε − δ) / 2ε for −δ, whose class is "
        f"{'recognised' if top == 1 else 'among the first five'}, of all images, with 95 % intervals. "
        f"By chance: {percent(min(top / classes, 1))} %."
    )
    names = ["perturbation of", "the model itself", *case.spec.get("classifiers", ())]
    return Figure(f"Perturbations classified, top-{top} ({case.label})", caption=caption, table=Table(names, rows))

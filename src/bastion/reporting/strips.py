"""HTML tables of the pictures that a probe stored of its first examples, with captions. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from bastion.measuring.measurement import MeasuredCase
from bastion.measuring.store import Column
from bastion.reporting.gallery import side_by_side
from bastion.reporting.grids import class_name
from bastion.reporting.pictures import Picture, data_uri, figure, run_mark, to_bytes
from bastion.reporting.tables import SharedTable
from bastion.reporting.wording import percent


@dataclass(frozen=True)
class Tile:
    """A picture of (C, H, W) bytes with its caption."""

    image: Column
    alt: str
    caption: str | Markup = ""


@dataclass(frozen=True)
class SharedPictures:
    """Pictures of the same examples in every row of a table."""

    positions: Column  # in the split
    row_numbers: Column  # in the columns of facts
    rows: list[dict[str, Column]]  # per row of the table, by name: one picture per example
    truths: list[str]


def shared_pictures(table: SharedTable, case: MeasuredCase, count: int) -> SharedPictures:
    """Return the pictures of the first `count` examples that all rows have pictures of."""
    positions, rows = side_by_side(table, case.label)
    positions = positions[:count]
    chosen = [{name: column[:count] for name, column in row.items()} for row in rows]
    facts = table.rows[0].facts
    numbers = facts.row_numbers(case.label, positions)
    labels = facts.columns[f"{case.label}/label"][numbers]
    return SharedPictures(positions, numbers, chosen, [class_name(facts.about.classes, label) for label in labels])


def first_images(table: SharedTable, case: MeasuredCase, count: int) -> list[str]:
    """Return names of the first examples in the columns of facts: `cat (image 0)`."""
    facts = table.rows[0].facts
    shown = zip(facts.about.positions(case), facts.columns[f"{case.label}/label"][:count], strict=False)
    return [f"{class_name(facts.about.classes, label)} (image {position})" for position, label in shown]


def percentages(table: SharedTable, fractions: Sequence[float]) -> Markup:
    """Return one percentage per line, each with the mark of its run."""
    line = Markup("{}{}&nbsp;%")
    shown = zip(table.rows, fractions, strict=True)
    return Markup("<br>").join(
        line.format(run_mark(row.run.number), percent(float(fraction))) for row, fraction in shown
    )


def tile(picture: Tile) -> Markup:
    return figure(Picture(data_uri(picture.image), picture.caption), picture.alt)


def image_tile(image: Column, alt: str, caption: str | Markup = "") -> Tile:
    """Return a tile of pixels in [0, 1]."""
    return Tile(to_bytes(image), alt, caption)


def table(
    columns: Sequence[str], rows: Sequence[tuple[str | Markup, Sequence[Tile | None]]], title: str | Markup, name: str
) -> Markup:
    """Return a table with a heading and names of columns and rows, which scrolls if it is too wide."""
    cell = Markup("<td>{}</td>")
    body = Markup("").join(
        Markup('<tr><th scope="row">{}</th>{}</tr>').format(
            words, Markup("").join(cell.format(tile(each) if each else "") for each in tiles)
        )
        for words, tiles in rows
    )
    head = Markup("").join(Markup('<th scope="col">{}</th>').format(column) for column in columns)
    return Markup(
        '<div class="scroll" tabindex="0" role="region" aria-label="{}"><table class="strip"><caption>{}</caption>'
        "<thead><tr><td></td>{}</tr></thead><tbody>{}</tbody></table></div>"
    ).format(name, title, head, body)

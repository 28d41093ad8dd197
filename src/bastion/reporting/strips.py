"""Small pictures in rows, with words below: what a probe kept of its first examples, as HTML. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from bastion.measuring.measurement import MeasuredCase
from bastion.measuring.store import Column
from bastion.reporting.gallery import side_by_side
from bastion.reporting.grids import class_name
from bastion.reporting.pictures import Picture, data_uri, figure, run_mark, to_bytes
from bastion.reporting.tables import Comparison
from bastion.reporting.wording import percent


@dataclass(frozen=True)
class Tile:
    """A picture of (C, H, W) bytes."""

    image: Column
    alt: str
    words: str | Markup = ""


@dataclass(frozen=True)
class Kept:
    """What was kept of the same examples in every row of a comparison."""

    positions: Column  # in the split
    places: Column  # in the columns of facts
    rows: list[dict[str, Column]]  # one a row of the comparison, by name: one picture an example
    truths: list[str]


def kept(comparison: Comparison, case: MeasuredCase, count: int) -> Kept:
    """Of the first `count` examples that all rows have pictures of."""
    positions, rows = side_by_side(comparison, case.label)
    positions = positions[:count]
    chosen = [{name: column[:count] for name, column in row.items()} for row in rows]
    facts = comparison.rows[0].facts
    places = facts.row_numbers(case.label, positions)
    labels = facts.columns[f"{case.label}/label"][places]
    return Kept(positions, places, chosen, [class_name(facts.about.classes, label) for label in labels])


def first_images(comparison: Comparison, case: MeasuredCase, count: int) -> list[str]:
    """Names of the first examples in the columns of facts: `cat (image 0)`."""
    facts = comparison.rows[0].facts
    shown = zip(facts.about.positions(case), facts.columns[f"{case.label}/label"][:count], strict=False)
    return [f"{class_name(facts.about.classes, label)} (image {position})" for position, label in shown]


def percentages(comparison: Comparison, fractions: Sequence[float]) -> Markup:
    """One below the other, each with the mark of its run."""
    line = Markup("{}{}&nbsp;%")
    shown = zip(comparison.rows, fractions, strict=True)
    return Markup("<br>").join(line.format(run_mark(row.run.mark), percent(float(fraction))) for row, fraction in shown)


def tile(picture: Tile) -> Markup:
    return figure(Picture(data_uri(picture.image), picture.words), picture.alt)


def photograph(image: Column, alt: str, words: str | Markup = "") -> Tile:
    """Of pixels in [0, 1]."""
    return Tile(to_bytes(image), alt, words)


def table(
    columns: Sequence[str], rows: Sequence[tuple[str | Markup, Sequence[Tile | None]]], title: str | Markup, name: str
) -> Markup:
    """A heading above, and a name for each column and row. It scrolls sideways where it does not fit."""
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

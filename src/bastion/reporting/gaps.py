"""Robust generalisation gap: accuracies on training and test images, and their difference. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from bastion.errors import shortened
from bastion.measuring.intervals import Estimate, difference
from bastion.reporting import svg
from bastion.reporting.boards import ACCURACIES, Board, LeaderboardColumn
from bastion.reporting.figures import Figure, Table
from bastion.reporting.wording import interval, percent, points

CAPTION = (
    "The same probes on images of the training split (open) and of the test split (filled): in %, each with its 95 % "
    "interval; the gap in percentage points, with the interval of two independent samples (Newcombe). See the "
    "recipe for the images that a model was trained on."
)
SHOWN = 40  # models in the plot
ROW = 20
LONGEST = 22  # letters of a name


@dataclass(frozen=True)
class Gap:
    """A model that was measured on both splits."""

    model: str
    category: str
    pairs: dict[str, tuple[Estimate, Estimate]]  # by the keys of columns: training, test


def gap_figures(boards: Sequence[Board]) -> dict[int, Figure]:
    """Return the figures by the id of the test board."""
    return {
        id(test): figure
        for test in boards
        for train in _training_boards(boards, test)
        if (figure := _figure(train, test))
    }


def _training_boards(boards: Sequence[Board], test: Board) -> Iterator[Board]:
    """Yield the boards with the training split of the same data set."""
    if test.data["split"] != "test":
        return
    for board in boards:
        if {**board.data, "digest": ""} == {**test.data, "split": "train", "digest": ""}:
            yield board


def _figure(train: Board, test: Board) -> Figure | None:
    known = {column.key for column in train.columns}
    columns = [column for column in test.columns if column.key in known and column.kind in ACCURACIES]
    gaps = list(_gaps(train, test, columns))
    columns = [column for column in columns if any(column.key in gap.pairs for gap in gaps)]
    if not columns:
        return None
    heads = [f"{column.short}, {part}" for column in columns for part in ("train", "test", "gap")]
    rows = [(gap.model, [gap.category or "–", *_cells(gap, columns)]) for gap in gaps]
    panels = [_panel(gaps[:SHOWN], column) for column in columns]
    return Figure("Training and test images", panels, CAPTION, Table(["model", "category", *heads], rows), legend=False)


def _gaps(train: Board, test: Board, columns: Sequence[LeaderboardColumn]) -> Iterator[Gap]:
    """Yield the models that are on both boards, in the order of the test board."""
    trained = {entry.weights: entry for entry in train.entries}
    for entry in test.entries:
        other = trained.get(entry.weights)
        pairs = {
            column.key: (other.numbers[column.key], entry.numbers[column.key])
            for column in columns
            if other and other.value(column) is not None and entry.value(column) is not None
        }
        if pairs:
            yield Gap(entry.model, entry.category, pairs)


def _cells(gap: Gap, columns: Sequence[LeaderboardColumn]) -> list[str]:
    cells = []
    for column in columns:
        if column.key not in gap.pairs:
            cells += ["–"] * 3
            continue
        train, test = gap.pairs[column.key]
        between = difference(test, train)
        cells += [f"{percent(each.value)} ({interval(each)})" for each in (train, test)]
        cells.append(f"{points(between.value)} ({points(between.low)} to {points(between.high)})")
    return cells


def _panel(gaps: Sequence[Gap], column: LeaderboardColumn) -> Markup:
    """Draw a line from the training to the test accuracy of each model."""
    shown = [gap for gap in gaps if column.key in gap.pairs]
    with svg.panel(420, ROW * len(shown) + 80, left=150, right=14, grid="x") as axes:
        axes.set(title=column.short, xlabel="images classified right (%)")
        for line, gap in enumerate(shown):
            train, test = (100 * each.value for each in gap.pairs[column.key])
            paint = svg.colour(0)
            axes.plot([train, test], [line, line], color=paint, linewidth=2, alpha=0.5)
            axes.plot(train, line, "o", color=svg.PAPER, markeredgecolor=paint, markersize=8)
            axes.plot(test, line, "o", color=paint, markersize=8)
        axes.set(xlim=(0, 100), ylim=(len(shown) - 0.5, -0.5), xticks=range(0, 101, 20))
        axes.set_yticks(range(len(shown)), [shortened(gap.model, LONGEST) for gap in shown])
        return svg.inline(axes, f"{column.short}: accuracy on training and test images", styled=False)

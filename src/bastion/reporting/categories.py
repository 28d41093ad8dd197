"""Means by category of model, and rank correlations of columns (Table 1 of Tang et al. 2022). No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bastion.measuring.correlation import LEAST, spearman
from bastion.reporting.boards import Board, Entry, LeaderboardColumn
from bastion.reporting.figures import Figure, Table
from bastion.reporting.wording import amount, percent

CORRELATED = (
    "Spearman’s rank correlation of each pair of columns over the models that have both, with its 95 % interval by "
    "Bonett and Wright. Models are taken as a sample; those of one family or one recipe are not independent."
)


class Numbers(NamedTuple):
    """Values of a column by model."""

    name: str
    values: dict[int, float]  # by the position of the entry
    is_share: bool  # shown in %


def category_means(board: Board) -> Figure | None:
    """Return a table of every column's mean over the models of each category."""
    if len(board.categories) < 2:
        return None
    columns = _columns(board, [column for column in board.columns if not column.is_two_phase])
    rows = []
    for category in board.categories:
        members = [position for position, entry in enumerate(board.entries) if entry.category == category]
        best = board.entries[members[0]].model
        rows.append((category, [str(len(members)), best, *(_mean(column, members) for column in columns)]))
    heads = ["category", "models", "first", *(column.name for column in columns)]
    caption = "Means over models. Click on “category” in the table above to see its models together, ranked as before."
    if any(column.is_two_phase for column in board.columns):
        caption += " Two-phase estimates have none, as they are not told without their intervals."
    return Figure("By category", caption=caption, table=Table(heads, rows))


def _mean(column: Numbers, members: Sequence[int]) -> str:
    values = [column.values[position] for position in members if position in column.values]
    if not values:
        return "–"
    return percent(float(np.mean(values))) if column.is_share else amount(float(np.mean(values)))


def correlations(board: Board) -> Figure | None:
    """Return a table of correlations between the columns that enough models have."""
    columns = [column for column in _columns(board, board.columns) if len(column.values) >= LEAST]
    if len(columns) < 2:
        return None
    rows = [(one.name, [_correlation(one, other) for other in columns[:number]]) for number, one in enumerate(columns)]
    rows = [(name, [*cells, *[""] * (len(columns) - 1 - len(cells))]) for name, cells in rows[1:]]
    table = Table(["", *(column.name for column in columns[:-1])], rows)
    return Figure("Rank correlations", caption=CORRELATED, table=table)


def _correlation(one: Numbers, other: Numbers) -> str:
    shared = sorted(one.values.keys() & other.values.keys())
    if len(shared) < LEAST:
        return "–"
    a, b = (np.array([each.values[position] for position in shared]) for each in (one, other))
    found = spearman(a, b)
    if found.value != found.value:  # NaN: one of the two is constant
        return "–"
    return f"{found.value:+.2f} ({found.low:+.2f} to {found.high:+.2f})".replace("-", "−")


def _columns(board: Board, columns: Sequence[LeaderboardColumn]) -> list[Numbers]:
    found = [Numbers(column.short, _values(board.entries, column), column.is_share) for column in columns]
    sizes = {number: float(entry.parameters) for number, entry in enumerate(board.entries) if entry.parameters}
    return [*found, Numbers("parameters", sizes, False)] if sizes else found


def _values(entries: Sequence[Entry], column: LeaderboardColumn) -> dict[int, float]:
    values = {position: entry.value(column) for position, entry in enumerate(entries)}
    return {position: value for position, value in values.items() if value is not None}

"""Pairs of models whose names differ by one word (Fig. 4 of Singh et al. 2023: ConvStem). No torch."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from bastion.measuring.intervals import Estimate
from bastion.reporting import svg
from bastion.reporting.boards import Board, Entry, LeaderboardColumn
from bastion.reporting.figures import Figure

WIDTH = 0.38  # of a bar


def pair_figure(board: Board, word: str) -> Figure | None:
    """Draw paired bars: `vit-s-heavy` and `vit-s-convstem-heavy` differ by the word `convstem`."""
    by_name = {entry.model: entry for entry in board.entries}
    pairs = [(by_name[other], entry) for entry in board.entries if (other := _without(entry.model, word)) in by_name]
    columns = [column for column in board.columns if column.is_share and _any(pairs, column)]
    if not pairs:
        return None
    panels = [_panel(pairs, column, word) for column in columns]
    caption = f"Pale: without {word}; full: with it. Whiskers are 95 % intervals over images."
    return Figure(f"With and without {word}", panels, caption, legend=False)


def _without(name: str, word: str) -> str | None:
    parts = name.split("-")
    return "-".join(part for part in parts if part != word) if word in parts else None


def _any(pairs: Sequence[tuple[Entry, Entry]], column: LeaderboardColumn) -> bool:
    return any(None not in (one.value(column), other.value(column)) for one, other in pairs)


def _panel(pairs: Sequence[tuple[Entry, Entry]], column: LeaderboardColumn, word: str) -> Markup:
    shown = [pair for pair in pairs if _any([pair], column)]
    with svg.panel(420, 300, left=44, right=14, bottom=74) as axes:
        axes.set_title(f"{column.short} (%)")
        for place, pair in enumerate(shown):
            for side, entry, alpha in ((-0.5, pair[0], 0.35), (0.5, pair[1], 0.9)):
                found: Estimate = entry.numbers[column.key]
                x = place + side * (WIDTH + 0.04)
                axes.bar(x, 100 * found.value, WIDTH, color=svg.colour(0), alpha=alpha, linewidth=0)
                axes.plot([x, x], [100 * found.low, 100 * found.high], color=svg.INK, linewidth=1.2)
        axes.set_xticks(range(len(shown)), [pair[0].model for pair in shown], rotation=20, ha="right")
        axes.set_ylim(bottom=0)
        return svg.inline(axes, f"{column.short}: with and without {word}", styled=False)

"""The leaderboard page: all measured models below a folder, with sorting and filters, self-contained. No torch."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from bastion import storage
from bastion.errors import BastionError
from bastion.reporting import html
from bastion.reporting.boards import Board, Entry, read_boards
from bastion.reporting.categories import category_means, correlations
from bastion.reporting.figures import Figure
from bastion.reporting.gaps import gap_figures
from bastion.reporting.pairs import pair_figure
from bastion.reporting.published_rows import with_published
from bastion.reporting.recipe_paths import path_figure
from bastion.reporting.wording import norm_sign

REPORT = "report.html"  # in a run's folder


def leaderboard(
    folder: str | Path,
    output: str | Path,
    *,
    over: str | None = None,
    pair: str | None = None,
    published: str | Path | None = None,
) -> tuple[list[Board], list[str]]:
    """Write the page about all models below `folder`. Returns its boards, and what was left out.

    `published` is a folder of RobustBench's JSON files, whose models are added and marked. `over` plots numbers over a
    setting of the recipe, such as `optimizer.l1`, of runs that differ in nothing else; `pair` plots models in pairs
    whose names differ by this word only.
    """
    boards, problems = read_boards(Path(folder))
    unread = len(problems)
    if published is not None:
        boards, left_out = with_published(boards, Path(published))
        problems += left_out
    storage.write_text(Path(output), render(boards, Path(output), unread, over=over, pair=pair))
    return boards, problems


def render(
    boards: Sequence[Board], output: Path, left_out: int = 0, *, over: str | None = None, pair: str | None = None
) -> str:
    script, style = _asset("leaderboard.js"), _asset("page.css") + _asset("leaderboard.css")
    return html.fill(
        "leaderboard.html.j2",
        boards=boards,
        models=sum(len(board.entries) for board in boards),
        norms={norm: norm_sign(norm) for norm in _norms(boards)},
        left_out=left_out,
        figures=_figures(boards, over, pair),
        reports={id(entry): _report(entry, output) for board in boards for entry in board.entries},
        script=Markup(script),
        style=Markup(style),
        policy=f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'",
    )


def _figures(boards: Sequence[Board], over: str | None, pair: str | None) -> dict[int, list[Figure]]:
    """Return the figures of each board, by its id."""
    gaps = gap_figures(boards)
    paths = {id(board): path_figure(board, over) for board in boards} if over else {}
    pairs = {id(board): pair_figure(board, pair) for board in boards} if pair else {}
    if over and not any(paths.values()):
        raise BastionError(f"over: no two trained and measured runs differ in {over} alone")
    if pair and not any(pairs.values()):
        raise BastionError(f"pair: no two measured models have names that differ by the word '{pair}' alone")
    found = {}
    for board in boards:
        every = [category_means(board), correlations(board), *(each.get(id(board)) for each in (gaps, paths, pairs))]
        found[id(board)] = [figure for figure in every if figure]
    return found


def _norms(boards: Sequence[Board]) -> list[str]:
    return list(dict.fromkeys(norm for board in boards for column in board.columns for norm in column.norms))


def _asset(name: str) -> str:
    return resources.files("bastion.reporting").joinpath("templates", name).read_text()


def _hash(content: str) -> str:
    """Return the hash that the content security policy allows this script or style by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _report(entry: Entry, output: Path) -> str:
    """Return the URL of the run's report relative to the page; empty if it has none."""
    page = entry.folder / REPORT
    path = Path(os.path.relpath(page, output.parent)).as_posix()
    return quote(os.fsencode(path)) if storage.is_file(page) else ""

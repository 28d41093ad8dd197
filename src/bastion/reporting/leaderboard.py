"""The page about all measured models below a folder. It sorts and filters itself, and loads nothing. No torch."""

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
from bastion.reporting.boards import Board, Entry, read_boards
from bastion.reporting.html import environment
from bastion.reporting.wording import norm_sign

REPORT = "report.html"  # in a run's folder


def leaderboard(folder: str | Path, output: str | Path) -> tuple[list[Board], list[str]]:
    """Write the page about all models below `folder`. Returns what is on it, and what could not be read."""
    boards, problems = read_boards(Path(folder))
    storage.write_text(Path(output), render(boards, Path(output), len(problems)))
    return boards, problems


def render(boards: Sequence[Board], output: Path, left_out: int = 0) -> str:
    script, style = _asset("leaderboard.js"), _asset("page.css") + _asset("leaderboard.css")
    return (
        environment()
        .get_template("leaderboard.html.j2")
        .render(
            boards=boards,
            models=sum(len(board.entries) for board in boards),
            norms={norm: norm_sign(norm) for norm in _norms(boards)},
            left_out=left_out,
            reports={id(entry): _report(entry, output) for board in boards for entry in board.entries},
            script=Markup(script),
            style=Markup(style),
            policy=f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
            "base-uri 'none'; form-action 'none'",
        )
    )


def _norms(boards: Sequence[Board]) -> list[str]:
    return list(dict.fromkeys(norm for board in boards for column in board.columns for norm in column.norms))


def _asset(name: str) -> str:
    return resources.files("bastion.reporting").joinpath("templates", name).read_text()


def _hash(content: str) -> str:
    """By which a browser lets this script or style run and no other."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _report(entry: Entry, output: Path) -> str:
    """The address of its report as seen from the page; empty if it has none."""
    page = entry.folder / REPORT
    return quote(Path(os.path.relpath(page, output.parent)).as_posix()) if page.is_file() else ""

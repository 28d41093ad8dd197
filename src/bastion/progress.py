"""Progress for people: bars with an ETA on a terminal's stderr, nothing when piped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

console = Console(stderr=True, highlight=False)

# advance(n, note="…"): n more units are done; the note stands behind the bar
Advance = Callable[..., None]


def _columns(unit: str, known: bool) -> list[ProgressColumn]:
    head: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
    if not known:
        return [*head, TimeElapsedColumn(), TextColumn("{task.fields[note]}", markup=False)]
    amount = [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
    return [
        *head,
        BarColumn(),
        *amount,
        TextColumn("{task.fields[note]}", markup=False),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    ]


@contextmanager
def bar(
    description: str, total: int | None, done: int = 0, unit: str = "items", *, silent: bool = False
) -> Iterator[Advance]:
    """`with bar("measuring", 200) as advance: advance(10)`. `total=None` shows the time that has passed."""
    hidden = silent or not console.is_terminal
    progress = Progress(*_columns(unit, total is not None), console=console, transient=True, disable=hidden)
    with progress:
        task = progress.add_task(description, total=total, completed=done, note="")

        def advance(count: int = 1, note: str | None = None) -> None:
            progress.advance(task, count)
            if note is not None:
                progress.update(task, note=note)

        yield advance

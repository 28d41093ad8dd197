"""Console output without control characters, and progress bars with an ETA on stderr; no bars when piped."""

from __future__ import annotations

import importlib.util
import io
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.segment import Segment
from rich.table import Column
from rich.text import Text

from bastion.errors import printable, shortened


class SafeConsole(Console):
    """A console that prints no control characters, which names, labels and paths may contain."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


console = SafeConsole(stderr=True, highlight=False)
LONGEST, SHORTEST_BAR = 18, 5  # characters of the description and of the bar, in a line of 80
WIDTH, INTERVAL = 80, 0.5  # characters of a line in a notebook, and seconds between two of them

# advance(n, note="…"): n more units are done; the note is shown after the bar
Advance = Callable[..., None]


class _TimeLeft(TimeRemainingColumn):
    """Counts down from the last given time left; without one, estimates it from the pace."""

    def render(self, task: Task) -> Text:
        if (ends := task.fields["ends"]) is None:
            return super().render(task)
        seconds = max(0.0, ends - time.monotonic())
        text = str(timedelta(seconds=round(seconds))) if math.isfinite(seconds) else "-:--:--"
        return Text(text, style="progress.remaining")


class _Note(ProgressColumn):
    """Shows the last note, shortened to fit the line."""

    def render(self, task: Task) -> Text:
        amount = max(len("100%"), 2 * len(f"{task.total:.0f}") + 1) if task.total else 0
        taken = len(task.description) + SHORTEST_BAR + amount + len("  ETA 0:00:00") + 5
        return Text(shortened(task.fields["note"], max(console.width - taken, 0)))


def _columns(unit: str, known: bool) -> list[ProgressColumn]:
    head: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
    if not known:
        return [*head, TimeElapsedColumn(), _Note()]
    amounts: dict[str, list[ProgressColumn]] = {
        "bytes": [DownloadColumn(), TransferSpeedColumn()],
        "items": [MofNCompleteColumn(table_column=Column(no_wrap=True))],
        "share": [TaskProgressColumn()],
    }
    return [
        *head,
        BarColumn(bar_width=None),  # the rest of the line
        *amounts[unit],
        _Note(Column(no_wrap=True)),
        TextColumn("ETA"),
        _TimeLeft(table_column=Column(no_wrap=True)),
    ]


class _NotebookLine:
    """The bar as one line of plain text in a notebook's output: rich's own needs ipywidgets, this does not."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.handle: Any = None  # IPython's, of the output that is updated
        self.shown = time.monotonic()  # work of less than INTERVAL shows nothing

    def update(self) -> None:
        if time.monotonic() - self.shown < INTERVAL:
            return
        text = io.StringIO()
        plain = SafeConsole(file=text, width=WIDTH, color_system=None, force_jupyter=False)
        plain.print(self.progress.get_renderable())
        self._show(text.getvalue().rstrip())
        self.shown = time.monotonic()

    def remove(self) -> None:
        if self.handle is not None:
            self._show("")

    def _show(self, line: str) -> None:
        content = {"text/plain": line}
        if self.handle is None:
            display = importlib.import_module("IPython.display").display
            self.handle = display(content, raw=True, display_id=True)
        else:
            self.handle.update(content, raw=True)


@contextmanager
def bar(
    description: str, total: float | None, done: float = 0, unit: str = "items", *, silent: bool = False
) -> Iterator[Advance]:
    """Show a progress bar: `with bar("measuring", 200) as advance: advance(10)`. `total=None` shows the elapsed time.

    `unit`: items or bytes; or share, if the caller itself gives the share that is done, from 0 to 1, and the seconds
    left, perhaps inf: `advance(done=0.2, left=60)`.
    """
    widgets = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
    hidden = silent or not (console.is_terminal or widgets)
    columns = _columns(unit, total is not None)
    progress = Progress(*columns, console=console, transient=True, disable=hidden, expand=total is not None)
    line = _NotebookLine(progress) if console.is_jupyter and hidden and not silent else None
    with progress:
        task = progress.add_task(shortened(description, LONGEST), total=total, note="", ends=None)
        progress.update(task, completed=done)

        def advance(
            count: int = 1, note: str | None = None, done: float | None = None, left: float | None = None
        ) -> None:
            changes: dict[str, Any] = {} if note is None else {"note": note}
            changes |= {} if left is None else {"ends": time.monotonic() + left}
            changes |= {"advance": count} if done is None else {"completed": done}
            progress.update(task, **changes)
            if line:
                line.update()

        try:
            yield advance
        finally:
            if line:
                line.remove()

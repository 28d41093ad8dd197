"""`bastion demo`: what robustness is, in a few minutes on two cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bastion.errors import Interrupted
from bastion.measuring.runner import measure
from bastion.progress import console
from bastion.reporting.html import report
from bastion.training.trainer import train

RECIPES = {"standard": "tiny/demo-standard", "robust": "tiny/demo-robust"}


def run_demo(folder: Path) -> str:
    """Train both models, attack both, write the report. Run it again to resume."""
    tables = []
    for name, recipe in RECIPES.items():
        console.print(f"[bold]{name}[/]: training {recipe}, then attacking it")
        with _advice():
            run = train(recipe, folder=folder / name, resume=True)
            workers = min(2, os.cpu_count() or 1)
            facts = measure(run.folder, suite="demo", data="cifar10-mini", limit=400, workers=workers)
        tables.append(facts.table())
    page = report([folder / name for name in RECIPES], folder / "report.html")
    return "\n\n".join([*tables, f"report: {page.resolve()}"])


@contextmanager
def _advice() -> Iterator[None]:
    """The demo resumes by itself, without the flags that its parts would need."""
    try:
        yield
    except Interrupted as stop:
        again = (
            "demo: stopped by a signal; what is done is stored. Run `bastion demo` again, with the same -o, to go on."
        )
        raise Interrupted(again, stop.signal) from stop

"""`bastion demo`: a standard and a robust model, trained and attacked in a few minutes on two cores."""

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
    """Train and attack both models, and write the report. Run it again to resume."""
    tables = []
    for name, recipe in RECIPES.items():
        console.print(f"[bold]{name}[/]: training {recipe}, then attacking it")
        with _resume_hint():
            run = train(recipe, folder=folder / name, resume=True)
            workers = min(2, os.cpu_count() or 1)
            facts = measure(run.folder, suite="demo", data="cifar10-mini", limit=400, workers=workers)
        tables.append(facts.table())
    page = report([folder / name for name in RECIPES], folder / "report.html")
    return "\n\n".join([*tables, f"report: {page.resolve()}"])


@contextmanager
def _resume_hint() -> Iterator[None]:
    """Replace the resume message of `train` and `measure` by the demo's own."""
    try:
        yield
    except Interrupted as stop:
        message = "demo: stopped by a signal; what is done is stored. Re-run `bastion demo` with the same -o to resume."
        raise Interrupted(message, stop.signal) from stop

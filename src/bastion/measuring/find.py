"""Finds the run that holds a model's facts: its own run, or a folder of `runs/` named after it. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from bastion import storage
from bastion.errors import BastionError
from bastion.listing import ZOO
from bastion.run import Run

RUNS = Path("runs")
CARD = "card.json"


def default_folder(name: str, weights: str) -> Path:
    """Return the run folder of a model that bastion did not train."""
    return RUNS / f"{slug(name)}-{weights[:8]}"


def find_run(model: str | Path) -> Run:
    """Find the run by its directory or the argument of `bastion measure`: `zoo/NAME`, `timm/NAME`, a folder, a file."""
    if not isinstance(model, str | Path):
        raise BastionError(
            f"expected a run directory or the name of a measured model, got {type(model).__name__}; `measure` stores "
            "facts in a run, `facts.run.folder`"
        )
    if (run := Run(Path(model))).exists():
        return run
    folder = ZOO / str(model).removeprefix("zoo/") if str(model).startswith("zoo/") else Path(model)
    if (folder / CARD).is_file():
        weights = str(storage.read_json(folder / CARD).get("weights"))
        found = [default_folder(folder.resolve().name, weights)]
    elif str(model).startswith(("timm/", "hf-hub:")) or ".py:" in str(model):
        name = Path(model).name if ".py:" in str(model) else str(model)
        found = sorted(RUNS.glob(f"{slug(name)}-????????"), key=lambda path: path.stat().st_mtime)
    else:
        from bastion.models.load import locate  # which says what is wrong with the name

        found = [locate(model)]
    measured = [run for run in map(Run, found) if run.exists()]
    if not measured:
        raise unmeasured(model)
    return measured[-1]


def unmeasured(model: str | Path, suite: str | None = None) -> BastionError:
    return BastionError(f"{model}: not measured yet; run `bastion measure {model} --suite {suite or 'demo'}` first")


def slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)

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
    elif ".py:" in str(model):
        found = _runs_of_function(str(model))
    elif str(model).startswith(("timm/", "hf-hub:")):
        found = _named(str(model))
    else:
        from bastion.models.load import locate  # which says what is wrong with the name

        found = [locate(model)]
    measured = [run for run in map(Run, found) if run.exists()]
    if not measured:
        raise unmeasured(model)
    return measured[-1]


def function_path(model: str | Path) -> str:
    """Return `path.py:function` with the path resolved, by which measurements of the function's network are found."""
    file, _, function = str(model).rpartition(":")
    return f"{Path(file).resolve()}:{function}"


def _runs_of_function(model: str) -> list[Path]:
    """Return the runs of this function: its file's name is not enough, as many files are called `model.py`."""
    named = _named(Path(model).name)
    sources = {folder: _sources(Run(folder)) for folder in named}
    if own := [folder for folder in named if function_path(model) in sources[folder]]:
        return own
    if len(named) == 1 and not any(sources[named[0]]):  # measured before paths were stored
        return named
    if named:
        listed = ", ".join(f"{folder} ({' '.join(filter(None, sources[folder])) or 'unknown'})" for folder in named)
        raise BastionError(
            f"{model}: no run is known to be of this file; give the folder of one, here with the file: {listed}"
        )
    return []


def _sources(run: Run) -> list[str]:
    stored = [storage.read_json(path) for path in storage.files(run.measurements, "*.json")]
    return sorted({str(each.get("source", "")) for each in stored})


def _named(name: str) -> list[Path]:
    """Return the default folders of models of this name, the newest last."""
    return sorted(RUNS.glob(f"{slug(name)}-????????"), key=lambda path: path.stat().st_mtime)


def unmeasured(model: str | Path, suite: str | None = None) -> BastionError:
    return BastionError(f"{model}: not measured yet; run `bastion measure {model} --suite {suite or 'demo'}` first")


def slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)

"""Converts measurements of bastion 0.1.0, which had one folder per probe and one file per block. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from bastion import storage
from bastion.errors import BastionError
from bastion.measuring.facts import write_measurement
from bastion.measuring.measurement import MeasuredAggregate, MeasuredCase, MeasuredThreat, Measurement
from bastion.measuring.store import POSITION, Column, FactStore
from bastion.progress import console
from bastion.run import Run
from bastion.suite import CORRECT, Role


def convert(run: Run) -> None:
    """Convert a run's old measurements in place. They can be read and reported; measuring again writes new facts."""
    old = {path: about for path in storage.files(run.measurements, "*.json") if (about := _old(path))}
    folders: set[Path] = set()
    for path, about in old.items():
        try:
            folders |= {_folder(run, name) for name in about["probes"].values()}
            write_measurement(run, _converted(run, about))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BastionError(f"{path}: not a measurement ({error}); remove it and measure again") from error
        storage.remove(path)
    for folder in folders:
        for pattern in ("facts-*.safetensors", "pictures-*.safetensors", "probe.json"):
            for file in storage.files(folder, pattern):
                storage.remove(file)
        with suppress(OSError):  # something else is in it
            folder.rmdir()
    if old:
        console.print(f"{run.folder}: converted from an earlier version: {len(old)} of its measurements", markup=False)


def _folder(run: Run, name: str) -> Path:
    """Return a folder of this run's facts. The name is checked, as it comes from a file without a checksum."""
    folder = run.facts / name
    if not re.fullmatch("[0-9a-f]{16}", name) or folder.is_symlink() or not folder.is_dir():
        raise ValueError(f"no facts '{name}'")
    return folder


def _old(path: Path) -> dict[str, Any] | None:
    """Read a measurement in the old format; None for a new one, or a damaged one, which fails when it is read."""
    with suppress(BastionError):
        about = storage.read_json(path)
        return about if "probes" in about else None
    return None


def _converted(run: Run, about: Mapping[str, Any]) -> Measurement:
    stores = {label: _move(run, folder, about) for label, folder in about["probes"].items()}
    cases = [_case(label, store, about) for label, store in stores.items()]
    right = [case.label for case in cases if case.has_accuracy]
    worst = {"worst case": MeasuredAggregate(kind="worst", members=dict.fromkeys(right, 1.0))}
    kept = ("created", "command", "seed", "versions", "machine", "model", "weights", "classes", "suite", "n")
    return Measurement(
        **{key: about[key] for key in kept},
        data={**about["data"], "split": about["split"]},
        cases=tuple(cases),
        aggregates=worst if len(right) > 1 else {},
    )


def _move(run: Run, folder: str, about: Mapping[str, Any]) -> FactStore:
    """Copy all blocks of a probe into one store."""
    store = FactStore(run.facts / f"before-{about['weights'][:8]}" / folder)
    origin = {"versions": about["versions"], "device": about["device"], "batch_size": about["batch"]}
    for path in storage.files(run.facts / folder, "facts-*.safetensors"):
        facts, _ = storage.read_arrays(path)
        start = int(path.stem.split("-")[1])
        positions = range(start, start + len(facts["index"]))
        pictures = _pictures(path.with_name(path.name.replace("facts", "pictures")), positions)
        store.write(positions, facts, pictures, origin)
    if lacking := store.missing(range(about["n"])):
        raise ValueError(f"{len(lacking)} of {about['n']} facts are missing")
    store.merge()
    return store


def _pictures(path: Path, positions: Sequence[int]) -> dict[str, Column]:
    """Read the pictures, which are of the first of these positions."""
    arrays = storage.read_arrays(path)[0] if storage.is_file(path) else {}
    pictures = {name: rows for name, rows in arrays.items() if name != "index"}
    count = len(next(iter(pictures.values()), ()))
    return pictures | ({POSITION: np.array(positions[:count])} if count else {})


def _case(label: str, store: FactStore, about: Mapping[str, Any]) -> MeasuredCase:
    columns = store.columns()
    threat = about.get("threats", {}).get(label)
    return MeasuredCase(
        label=label,
        kind="probes",
        role=_role(columns),
        store=store.name,
        n=about["n"],
        spec={"was": about["described"][label]},
        threat=MeasuredThreat(**threat) if threat else None,
        members=tuple(about.get("members", {}).get(label, ())),
        columns=tuple(columns),
    )


def _role(columns: list[str]) -> Role:
    if "in_budget" in columns or "distance" in columns:
        return "attack"
    return "clean" if CORRECT in columns else "check"

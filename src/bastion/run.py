"""The run directory: what a training or a measuring left behind, in files that outlive a crash. No torch.

recipe.yaml          the resolved recipe (training only)
provenance.json      versions, machine, command, seed
log.jsonl            one line per logged step and per epoch
tensorboard/         the same numbers for TensorBoard
checkpoints/         training state, the last few
model/               weights and card
epochs/              models of single epochs, where they are compared after training
facts/               one folder per probe, one file per block of examples
measurements/        which probes make up a measured suite
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bastion import recipe_yaml, storage
from bastion.errors import BastionError
from bastion.recipe import Recipe, differences

_PACKAGES = ("bastion", "torch", "torchvision", "timm", "numpy")


@dataclass(frozen=True)
class Run:
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def epochs(self) -> Path:
        return self.folder / "epochs"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.folder / "tensorboard"

    @property
    def launched(self) -> Path:
        """Names the torchrun that trains or trained it."""
        return self.folder / ".launched"

    @property
    def facts(self) -> Path:
        return self.folder / "facts"

    @property
    def measurements(self) -> Path:
        return self.folder / "measurements"

    @property
    def log_file(self) -> Path:
        return self.folder / "log.jsonl"

    def recipe(self) -> dict[str, Any] | None:
        """The resolved recipe, or None where nothing was trained."""
        path = self.folder / "recipe.yaml"
        try:
            return recipe_yaml.read(path.read_text(), str(path)) if path.is_file() else None
        except (OSError, UnicodeDecodeError) as error:
            raise BastionError(f"{path}: cannot be read: {error}") from error

    def provenance(self) -> dict[str, Any]:
        content = storage.read_json(self.folder / "provenance.json")
        if not isinstance(content, dict):
            raise BastionError(f"{self.folder}/provenance.json: expected an object; restore or remove it")
        return content

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one line. A line cut off by a crash is skipped by `history`."""
        try:
            with self.log_file.open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise storage.disk_error(self.log_file, error) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process trains a run. The lock goes with the process, however that ends."""
        import fcntl  # not on every system, and only training needs it

        try:
            file = (self.folder / ".lock").open("w")
        except OSError as error:
            raise storage.disk_error(self.folder / ".lock", error) from error
        with file:
            for patience in reversed(range(10)):  # the loaders of a process that was killed keep it for some seconds
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not patience:
                        busy = f"{self.folder}: another process is training this run; wait, or stop it"
                        raise BastionError(busy) from None
                    time.sleep(0.7)
            yield

    def history(self) -> list[dict[str, Any]]:
        """All whole lines of the log."""
        if not self.log_file.is_file():
            return []
        records = []
        for line in self.log_file.read_text(errors="replace").splitlines():
            with suppress(json.JSONDecodeError):
                records.append(json.loads(line))
        return [record for record in records if isinstance(record, dict) and {"kind", "step"} <= record.keys()]

    def rewind_log(self, step: int, kind: str | None = None) -> None:
        """Forget what was logged after `step`, or only what is of this kind; it will be logged anew."""
        kept = [each for each in self.history() if each["step"] <= step or kind not in (None, each["kind"])]
        storage.write_text(self.log_file, "".join(json.dumps(record) + "\n" for record in kept))


def open_run(folder: str | Path) -> Run:
    """An existing run."""
    run = Run(Path(folder))
    if not (run.folder / "provenance.json").is_file():
        raise BastionError(
            f"{folder}: not a run directory (no provenance.json); make one with `bastion train` or `measure`"
        )
    return run


def create_run(folder: Path, seed: int, recipe: Recipe | None = None) -> Run:
    """The run of this recipe in `folder`: a new one, or the one that is there if its recipe is the same."""
    run = Run(Path(folder))
    if run.folder.exists() and not run.folder.is_dir():
        raise BastionError(f"{folder}: is a file; give a folder for the run")
    if (run.folder / "provenance.json").is_file():
        _check_same(run, recipe)
        return run
    if recipe is not None:
        storage.write_text(run.folder / "recipe.yaml", recipe_yaml.dump(recipe.resolved()))
    storage.write_json(run.folder / "provenance.json", environment(seed))
    return run


def _check_same(run: Run, recipe: Recipe | None) -> None:
    if recipe is None:
        return
    stored = run.recipe()
    if stored is None:
        raise BastionError(
            f"{run.folder}: has no recipe.yaml: nothing was trained here, or it is lost; use another --run"
        )
    try:
        old = Recipe.model_validate(stored)
    except ValidationError as error:
        raise BastionError(
            f"{run.folder}/recipe.yaml: not a recipe that this version reads; use another --run"
        ) from error
    if old.hash() != recipe.hash():
        changed = "; ".join(differences(old.hashed_fields(), recipe.hashed_fields()))
        raise BastionError(f"{run.folder}: is the run of another recipe ({changed}); use another --run, or that recipe")


def environment(seed: int) -> dict[str, Any]:
    """What a number may depend on besides model and data."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "seed": seed,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "processor": processor(),
            "cores": os.cpu_count(),
        },
    }


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def processor() -> str:
    """The processor's own name; `platform.processor()` is empty or only the architecture on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

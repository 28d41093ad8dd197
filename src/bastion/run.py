"""The run directory: the results of training and measuring, in files that survive a crash. No torch.

recipe.yaml          the resolved recipe (training only)
provenance.json      the run's id, versions, machine, command, seed
log.jsonl            one line per logged step and per epoch
tensorboard/         the same numbers for TensorBoard
checkpoints/         training state, the last few
model/               weights and card; networks that the objective trained beside the model
epochs/              models of single epochs, if they are compared after training
facts/               by model and data, and by probe: one file per batch of examples until all are measured, then one
measurements/        the probes of each measured suite

Recipe and log carry checksums that include the run's id, so that damage and files of another run are detected. Runs
from before there were ids are read without these checks.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bastion import recipe_yaml, storage
from bastion.card import CARD, Card
from bastion.errors import BastionError, printable, shown
from bastion.recipe import Recipe, differences

RECIPE = "recipe.yaml"
PROVENANCE = "provenance.json"
SEAL = "# run "  # start of the last line of a recipe
_PACKAGES = ("bastion", "torch", "torchvision", "timm", "numpy")


@dataclass(frozen=True)
class Run:
    folder: Path

    @property
    def name(self) -> str:
        return printable(self.folder.resolve().name)

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
        """File with the id of the torchrun that trains or trained it."""
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

    def id(self) -> str | None:
        """Return the run's random id; None if it does not exist, or is older than ids."""
        known = self.provenance().get("id") if self.exists() else None
        if known is not None and not isinstance(known, str):
            raise BastionError(f"{self.folder / PROVENANCE}: not that of a run: its id is {shown(known)}; restore it")
        return known

    def exists(self) -> bool:
        return storage.is_file(self.folder / PROVENANCE)

    def recipe(self) -> dict[str, Any] | None:
        """Return the resolved recipe; None if nothing was trained."""
        path = self.folder / RECIPE
        if not storage.is_file(path):
            return None
        text = storage.read_text(path)
        run_id = self.id()
        if run_id and text != _sealed(text.rpartition(SEAL)[0], run_id):
            raise BastionError(f"{path}: damaged, edited or of another run: its checksum does not match; restore it")
        return recipe_yaml.read(text, str(path))

    def provenance(self) -> dict[str, Any]:
        return storage.read_json(self.folder / PROVENANCE)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one line. `history` skips a line that a crash cut off."""
        try:
            with self.log_file.open("a") as file:
                file.write(_log_line(record, self.id()))
        except OSError as error:
            raise storage.disk_error(self.log_file, error) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run for training. The lock is released when the process ends, however that happens."""
        import fcntl  # not on every system, and only training needs it

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / ".lock").open("w")
        except FileExistsError:
            raise BastionError(f"{self.folder}: is a file; give a folder for the run") from None
        except OSError as error:
            raise storage.disk_error(self.folder / ".lock", error) from error
        with file:
            for tries_left in reversed(range(10)):  # data loaders of a killed process hold the lock for some seconds
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not tries_left:
                        busy = f"{self.folder}: another process is training this run; wait, or stop it"
                        raise BastionError(busy) from None
                    time.sleep(0.7)
            yield

    def history(self) -> list[dict[str, Any]]:
        """Return all records of the log."""
        known = self._steps_known()  # before the log: a running training logs steps before it stores their checkpoint
        if not storage.is_file(self.log_file):
            return []
        with storage.opened(self.log_file) as file:
            *lines, last = file.read().decode(errors="replace").split("\n")
        run_id = self.id()
        if last and _is_whole(last):  # a complete record without its newline
            lines.append(last)
        records = [_log_record(line, run_id) for line in lines]
        if run_id and None in records:
            raise BastionError(
                f"{self.log_file}: line {records.index(None) + 1} is damaged, edited or of another run: its checksum "
                "does not match; restore the file, or remove it to go on without"
            )
        for number, record in enumerate(records, 1):
            if record is not None and not _is_formed(record):
                raise BastionError(f"{self.log_file}: line {number} has not the form of a record; restore or remove it")
        kept = [record for record in records if record is not None]
        if (steps := sum(record["kind"] == "step" for record in kept)) < known:
            raise BastionError(
                f"{self.log_file}: its end is lost: it has {steps} steps, and had {known} when the last checkpoint was "
                "stored; restore the file, or remove it to go on without"
            )
        return kept

    def _steps_known(self) -> int:
        """Return the number of logged steps in the newest checkpoint; 0 if there is none."""
        for path in sorted(self.checkpoints.glob("step-*.safetensors"), reverse=True):
            with suppress(BastionError, OSError, LookupError, TypeError, ValueError):  # damaged, or gone by now
                header = json.loads(storage.read_metadata(path)["state"].partition(" ")[2])
                return int(dict(header["content"]["dict"]).get("logged", 0))
        return 0

    def steps_logged(self) -> int:
        """Flush the log to disk and return its number of steps, to be stored in a checkpoint."""
        try:
            storage.sync(self.log_file)
            return self.log_file.read_bytes().count(b'{"kind": "step"')
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise storage.disk_error(self.log_file, error) from error

    def rewind_log(self, step: int, kind: str | None = None) -> None:
        """Remove the records after `step`, or only those of this kind; they will be logged again."""
        kept = [each for each in self.history() if each["step"] <= step or kind not in (None, each["kind"])]
        run_id = self.id()
        storage.write_text(self.log_file, "".join(_log_line(record, run_id) for record in kept))

    def card(self) -> Card | None:
        """Return the card of the run's model, None if there is none; raise if it is of another run."""
        return read_card(self.model) if storage.is_file(self.model / CARD) else None

    def results(self) -> list[Path]:
        """Return results of training here, which another training would overwrite."""
        folders = (self.model, self.epochs, self.checkpoints)
        found = [folder for folder in folders if storage.files(folder, "*")]
        log = [self.log_file] if storage.is_file(self.log_file) and self.log_file.stat().st_size else []
        return [*found, *log]


def _sealed(text: str, run_id: str) -> str:
    return f"{text}{SEAL}{run_id}, sha256 {storage.sha256(run_id.encode(), text.encode())}\n"


def _log_line(record: Mapping[str, Any], run_id: str | None) -> str:
    checksum = {"checksum": _log_checksum(record, run_id)} if run_id else {}
    return json.dumps({**record, **checksum}) + "\n"


def _log_record(line: str, run_id: str | None) -> dict[str, Any] | None:
    """Parse a line of the log; None if it is not a record of this run."""
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            return None
        if run_id and record.pop("checksum", None) != _log_checksum(record, run_id):
            return None
    except (ValueError, RecursionError):
        return None
    return record


def _is_formed(record: Mapping[str, Any]) -> bool:
    """Whether a record has a kind and a step, and an event a message."""
    message = record.get("message", "") if record.get("kind") != "event" else record.get("message")
    return isinstance(record.get("kind"), str) and type(record.get("step")) is int and isinstance(message, str)


def _log_checksum(record: Mapping[str, Any], run_id: str) -> str:
    return storage.sha256(run_id.encode(), json.dumps(record).encode())[:8]


def _is_whole(line: str) -> bool:
    """Whether the line starts with a complete record; one that a crash cut off does not."""
    try:
        json.JSONDecoder().raw_decode(line)
    except (ValueError, RecursionError):
        return False
    return True


def read_card(folder: Path) -> Card:
    """Read the card of a model folder; if that is in a run, raise if the model is of another run."""
    path = folder / CARD
    try:
        card = Card.model_validate(storage.read_json(path))
    except ValidationError as error:
        raise BastionError(
            f"{path}: not a model card that this version reads ({first_mistake(error)}); restore it"
        ) from error
    trained_by, run = card.about.get("run_id"), _run_of(folder.resolve())
    if trained_by is not None and run is not None and trained_by != run.id():
        raise BastionError(f"{path}: is the model of another run ({trained_by!s:.40}); put back this run's own")
    return card


def _run_of(model: Path) -> Run | None:
    """Return the run that has this as its model, or as that of an epoch."""
    run = Run(model.parent.parent if model.parent.name == "epochs" else model.parent)
    return run if run.exists() and (model == run.model or model.parent == run.epochs) else None


def first_mistake(error: ValidationError) -> str:
    """Return where content has not the form it should have, and what is wrong there."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'content'}: {first['msg'].lower()}"


def open_run(folder: str | Path) -> Run:
    """Open an existing run."""
    run = Run(Path(folder))
    if not run.exists():
        raise BastionError(
            f"{folder}: not a run directory (no provenance.json); make one with `bastion train` or `measure`"
        )
    return run


def create_run(folder: Path, seed: int, recipe: Recipe | None = None) -> Run:
    """Create the run of this recipe in `folder`, or return the existing one if its recipe is the same."""
    run = Run(Path(folder))
    if storage.is_file(run.folder):
        raise BastionError(f"{folder}: is a file; give a folder for the run")
    if run.exists():
        _check_same(run, recipe)
        return run
    run_id = secrets.token_hex(8)
    if recipe is not None:
        storage.write_text(run.folder / RECIPE, _sealed(recipe_yaml.dump(recipe.resolved()), run_id))
    storage.write_json(run.folder / PROVENANCE, {"id": run_id, **environment(seed)})
    return run


def begin_training(run: Run, recipe: Recipe, *, resume: bool) -> None:
    """Create the run; raise if that would overwrite an earlier training. The caller holds the lock."""
    results = run.results()
    if results and not run.exists():
        raise BastionError(
            f"{run.folder}: has {results[0].name} but no {PROVENANCE}; restore that file, or use another --run"
        )
    create_run(run.folder, recipe.seed, recipe)
    if results and not resume:
        raise BastionError(
            f"{run.folder}: has been trained already; go on with --resume, or use another --run (in Python: "
            "resume=True or folder=…)"
        )
    if storage.files(run.checkpoints, "step-*.safetensors"):
        return
    # A run that stopped before its first checkpoint has at most logged some steps: it may start again.
    if results not in ([], [run.log_file]) or any(record["kind"] == "epoch" for record in run.history()):
        raise BastionError(
            f"{run.folder}: its checkpoints are lost, and without one it would start over; restore one, or use "
            "another --run"
        )


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
        found = differences(old.hashed_fields(), recipe.hashed_fields())
        further = all(each.startswith("schedule.") for each in found)
        hint = f"; to train its model further, begin another run with --set init.from={run.folder}" if further else ""
        raise BastionError(
            f"{run.folder}: is the run of another recipe ({'; '.join(found)}); use another --run, or that recipe{hint}"
        )


def environment(seed: int) -> dict[str, Any]:
    """Return the provenance: date, command, seed, versions and machine."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "seed": seed,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "processor": processor(),
            "cores": os.cpu_count(),
        },
    }


def usable_cores() -> int:
    """Return the number of cores that this process may use, which Slurm, a container or `taskset` may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _command() -> str:
    """Return the command line; `python -m bastion` is shown as `bastion`."""
    name = Path(sys.argv[0]).name
    return shlex.join(["bastion" if name == "__main__.py" else name, *sys.argv[1:]])


@cache
def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def processor() -> str:
    """Return the processor's name; on Linux `platform.processor()` is empty or only the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

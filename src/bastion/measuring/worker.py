"""What a worker does: one batch of examples, or one part of a study, at a time, stored as soon as it is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bastion import rng, storage
from bastion.acceleration import accelerate
from bastion.data import datasets
from bastion.errors import BastionError
from bastion.forward import in_mode
from bastion.measuring.identity import device_of
from bastion.measuring.store import ORIGIN, PICTURE, POSITION, FactStore
from bastion.models import Classifier
from bastion.models.columns import ChosenClasses, with_columns
from bastion.models.load import load
from bastion.probes import probes
from bastion.recipe_files import merge
from bastion.registry import canonical
from bastion.run import processor, version
from bastion.studies import studies
from bastion.suite import Case, Suite
from bastion.types import DataSet, Probe, Study

Data = DataSet | Mapping[str, Any] | str
RESERVED = {POSITION, ORIGIN, "index", "label"}
Task = tuple[int, list[int]]  # the number of a case, and positions of examples or parts of a study


@dataclass(frozen=True)
class Job:
    """What every worker needs to know: names rather than things where there are names, as each builds its own."""

    model: nn.Module | Path
    data: Data
    split: str
    suite: Suite
    folder: Path  # of the facts of this model and data
    seed: int
    batch_size: int
    keep: int  # pictures are kept of so many first examples
    devices: tuple[str, ...]  # that workers are given in turn
    acceleration: bool


class Worker:
    """Measures one task at a time, on one thread."""

    def __init__(self, job: Job, model: nn.Module, known: Mapping[str, DataSet] | None = None) -> None:
        self.job, self.cases = job, job.suite.cases()
        self._data = dict(known or {})
        measured = with_columns(model, self._variant(job.suite.data))
        self.model = accelerate(measured, enabled=job.acceleration)  # once for all attacks of all probes
        self._origin = _origin(model, job)

    @cached_property
    def built(self) -> list[Probe | Study]:
        return [build_case(case) for case in self.cases]

    def data(self, case: Case) -> DataSet:
        """The variant of the data set that the case is about."""
        return self._variant(case.data)

    def _variant(self, changes: Mapping[str, Any]) -> DataSet:
        key = data_key(changes)
        if key not in self._data:
            self._data[key] = build_data(self.job.data, changes)
        return self._data[key]

    def store(self, case: Case) -> FactStore:
        return self._stores[self.cases.index(case)]

    @cached_property
    def _stores(self) -> list[FactStore]:
        return [self._store(case, built) for case, built in zip(self.cases, self.built, strict=True)]

    def _store(self, case: Case, built: Probe | Study) -> FactStore:
        """Named by all that the facts depend on besides the model and the data set itself."""
        named: dict[str, Any] = {case.kind: canonical(built), "seed": self.job.seed}
        if isinstance(built, Probe) and any(number != 1 for number in built.describe().versions):
            named["versions"] = built.describe().versions
        if data_key(case.data) != data_key(self.job.suite.data):
            data = self.data(case)
            named["data"] = [data.fingerprint, getattr(data, self.job.split).digest()]
        return FactStore(self.job.folder / storage.fingerprint(named, digits=16))

    def positions(self, case: Case, n: int) -> range:
        built = self.built[self.cases.index(case)]
        if isinstance(built, Probe):
            return range(n)
        return range(max(1, built.parts(self.model.given, self.data(case))))

    def open_tasks(self, n: int) -> list[Task]:
        """What is not stored yet. Cases that are equal share their facts, and are measured once."""
        tasks: dict[tuple[Path, int], Task] = {}
        for number, case in enumerate(self.cases):
            store = self.store(case)
            missing = store.missing(self.positions(case, n))
            size = self.job.batch_size if case.kind == "probes" else 1
            for batch in _cut(missing, size):
                tasks.setdefault((store.folder, batch[0]), (number, batch))
        return list(tasks.values())

    def __call__(self, task: Task) -> int:
        """Measure and store; returns how many examples or parts that was."""
        number, positions = task
        case, built = self.cases[number], self.built[number]
        with in_mode(self.model, training=False), rng.preserved():
            # For models that draw random numbers. The label has no part in it: suites share facts.
            rng.reseed("measure", self.job.seed, self.store(case).name, positions[0])
            if isinstance(built, Probe):
                facts, pictures = self._probe(case, built, positions)
            else:
                answer = built(self.model.given, self.data(case), positions[0], seed=self.job.seed)
                if wrong := [name for name in answer if name in RESERVED or name.startswith(PICTURE)]:
                    raise BastionError(f"study '{case.label}': '{wrong[0]}' is a name that bastion uses itself")
                facts, pictures = {name: torch.as_tensor(value)[None] for name, value in answer.items()}, {}
        self.store(case).write(
            positions,
            {name: column.detach().cpu().numpy() for name, column in facts.items()},
            {name: column.detach().cpu().numpy() for name, column in pictures.items()},
            self._origin,
        )
        return len(positions)

    def _probe(self, case: Case, probe: Probe, positions: list[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Facts of all these examples, and pictures of those that are among the first."""
        data = self.data(case)
        batch = getattr(data, self.job.split).batch(positions)
        batch = batch.check(len(data.classes), f"measure, probe '{case.label}'")
        answer = probe(self.model, batch.to(device_of(self.model)), seed=self.job.seed)
        for name, column in answer.items():
            if name in RESERVED or name.startswith(PICTURE):
                raise BastionError(f"probe '{case.label}': '{name}' is a name that bastion uses itself; choose another")
            if column.ndim == 0 or len(column) != len(positions):
                raise BastionError(
                    f"probe '{case.label}': '{name}' has shape {tuple(column.shape)} for {len(positions)} examples"
                )
        shown = sum(position < self.job.keep for position in positions)
        facts = {name: column for name, column in answer.items() if column.ndim == 1}
        pictures = {name: column[:shown] for name, column in answer.items() if column.ndim > 1 and shown}
        return {"index": batch.index, "label": batch.y, **facts}, pictures


def build_case(case: Case) -> Probe | Study:
    path = f"{case.kind}.{case.base}"
    return probes.build(case.spec, path) if case.kind == "probes" else studies.build(case.spec, path)


def build_data(data: Data, changes: Mapping[str, Any]) -> DataSet:
    """The data set with these changes to its settings."""
    if isinstance(data, DataSet):
        if changes:
            raise BastionError(
                f"data: the suite changes {', '.join(changes)}, so the data set must be given by its name or settings"
            )
        return data
    return datasets.build(merge({"data": data}, {"data": changes})["data"] if changes else data, "data")


def check_fit(model: nn.Module, data: DataSet) -> None:
    measured = with_columns(model, data)
    if not isinstance(model, Classifier):
        _check_logits(measured, data)
    elif not isinstance(measured, ChosenClasses) and model.num_classes != len(data.classes):
        more = model.num_classes > len(data.classes) and data.columns is None
        raise BastionError(
            f"measure: the model has {model.num_classes} classes, {data.name} has {len(data.classes)}; "
            + ("say which of the model's they are (`class_map`), or " if more else "")
            + "measure it on the data it was trained for"
        )
    else:
        model.check_input(data.shape, f"measure on {data.name}")


def _check_logits(model: nn.Module, data: DataSet) -> None:
    """A network of the user's own must give one logit per class for an image of the data."""
    k, shape = len(data.classes), ", ".join(map(str, data.shape))
    expected = f"measure: the model must give float logits (B, {k}) for images (B, {shape}) in [0, 1]"
    images = rng.uniform(0, torch.arange(2), "check", data.shape).to(device_of(model))
    try:
        with torch.no_grad(), in_mode(model, training=False), rng.preserved():
            logits = model(images)
    except Exception as error:
        raise BastionError(f"{expected}; it raised {type(error).__name__}: {error}") from error
    if not isinstance(logits, Tensor):
        raise BastionError(f"{expected}; it gave {type(logits).__name__}")
    if logits.shape != (2, k) or not logits.is_floating_point():
        raise BastionError(f"{expected}; for two images it gave {logits.dtype} {tuple(logits.shape)}")


def _origin(model: nn.Module, job: Job) -> dict[str, Any]:
    """What facts depend on by rounding alone."""
    return {
        "versions": {name: version(name) for name in ("bastion", "torch", "timm")},
        "device": str(device_of(model).type),
        "processor": processor(),
        "batch_size": job.batch_size,
        "acceleration": job.acceleration,
    }


def on_device(model: nn.Module | Path, device: str) -> nn.Module:
    return model if isinstance(model, nn.Module) else load(model).to(device)


def _cut(positions: list[int], size: int) -> list[list[int]]:
    """Batches that begin at multiples of `size`, so that a longer measurement makes the same ones."""
    batches: dict[int, list[int]] = {}
    for position in positions:
        batches.setdefault(position // size, []).append(position)
    return list(batches.values())


def data_key(changes: Mapping[str, Any]) -> str:
    return storage.fingerprint(dict(changes))

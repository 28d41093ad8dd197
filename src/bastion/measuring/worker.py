"""What a worker does: one batch of examples, or one part of a study, at a time, stored as soon as it is done."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bastion import rng, storage
from bastion.acceleration import Accelerated, accelerate
from bastion.data import datasets
from bastion.errors import BastionError
from bastion.forward import device_of, in_mode
from bastion.measuring.store import ORIGIN, PICTURE, POSITION, Column, FactStore
from bastion.models import Classifier
from bastion.models.adapt import resized
from bastion.models.columns import ChosenClasses, with_columns
from bastion.models.load import load
from bastion.probes import probes
from bastion.recipe_files import merge
from bastion.registry import canonical
from bastion.run import processor, version
from bastion.studies import studies
from bastion.suite import CORRECT, Case, Suite
from bastion.types import DataSet, Probe, Study

Data = DataSet | Mapping[str, Any] | str
MOST_BYTES = 64 * 2**20  # of images that make several batches one: large ones fill a model without it
RESERVED = {POSITION, ORIGIN, "index", "label"}


class Task(NamedTuple):
    case: int  # its number
    batch: int  # its number in the order of examples; the part of a study
    positions: Column  # of examples, ascending; the part of a study

    @property
    def key(self) -> str:
        return f"{self.case}/{self.batch}"


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
    pictured: frozenset[int]  # positions of the examples that pictures are kept of
    devices: tuple[str, ...]  # that workers are given in turn
    acceleration: bool


class Worker:
    """Measures one task at a time, on one thread."""

    def __init__(self, job: Job, model: nn.Module, built: dict[str, DataSet] | None = None) -> None:
        self.job, self.cases, self._network = job, job.suite.cases(), model
        self._built = {} if built is None else built
        self._data: dict[str, DataSet] = {}  # by the changes of a case
        self._networks: dict[tuple[int, int, int], nn.Module] = {}  # by the shape of images
        self._models: dict[tuple[int, int, int], Accelerated] = {}
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
            self._data[key] = build_data(self.job.data, changes, self._built)
        return self._data[key]

    def network_for(self, case: Case) -> nn.Module:
        """The network as given; if the suite asks for it, adapted to images of a size that it does not take."""
        shape = self.data(case).shape
        if shape not in self._networks:
            self._networks[shape] = adapted(self._network, shape) if self.job.suite.adapt_size else self._network
        return self._networks[shape]

    def model_for(self, case: Case) -> Accelerated:
        """What attacks and probes of this case get."""
        data, network = self.data(case), self.network_for(case)
        if network is self._network:
            return self.model
        if data.shape not in self._models:
            self._models[data.shape] = accelerate(with_columns(network, data), enabled=self.job.acceleration)
        return self._models[data.shape]

    def store(self, case: Case) -> FactStore:
        return self._stores[self.cases.index(case)]

    def sharing(self, number: int) -> list[Case]:
        """Cases with the same facts as this one."""
        folder = self._stores[number].folder
        return [case for case, store in zip(self.cases, self._stores, strict=True) if store.folder == folder]

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
            named["data"] = [data.fingerprint, data.split(self.job.split).digest()]
        return FactStore(self.job.folder / storage.fingerprint(named, digits=16))

    def parts(self, case: Case) -> int:
        """Of a study."""
        built = self.built[self.cases.index(case)]
        return max(1, built.parts(self.model_for(case).given, self.data(case))) if isinstance(built, Study) else 0

    def tasks(self, order: Column) -> list[Task]:
        """All there is to do: studies first, then batch by batch of the order, with all probes each.

        Cases that are equal share their facts, and are measured once.
        """
        distinct = {store.folder: number for number, store in reversed(list(enumerate(self._stores)))}.values()
        by_kind = {
            kind: [number for number in sorted(distinct) if self.cases[number].kind == kind]
            for kind in ("studies", "probes")
        }
        studies = [
            Task(number, part, np.array([part]))
            for number in by_kind["studies"]
            for part in range(self.parts(self.cases[number]))
        ]
        cut: dict[int, list[Column]] = {}  # by batch size, and so once for all probes: a million examples take 8 MB
        probes = [task for number in by_kind["probes"] for task in self._batches(number, order, cut)]
        return studies + sorted(probes, key=lambda task: (task.batch, task.case))

    def _batches(self, number: int, order: Column, cut: dict[int, list[Column]]) -> list[Task]:
        """Of one probe. The number of a batch is that of the first usual one in it."""
        built, usual = self.built[number], self.job.batch_size
        room = MOST_BYTES // (4 * usual * math.prod(self.data(self.cases[number]).shape))
        size = usual * max(1, min(built.batches, room)) if isinstance(built, Probe) else usual
        if size not in cut:
            cut[size] = [np.sort(order[start : start + size]) for start in range(0, len(order), size)]
        return [Task(number, place * size // usual, positions) for place, positions in enumerate(cut[size])]

    def open_tasks(self, tasks: Iterable[Task]) -> list[Task]:
        """Those of them that are not stored yet, or what is left of them."""
        stored = {number: store.stored([])[POSITION] for number, store in enumerate(self._stores)}
        left = [task._replace(positions=_without(task.positions, stored[task.case])) for task in tasks]
        return [task for task in left if len(task.positions)]

    def right(self, task: Task) -> Column | None:
        """What is stored of a task, as it was returned when it was done."""
        stored = self._stores[task.case].stored([CORRECT])
        return stored[CORRECT][np.isin(stored[POSITION], task.positions)] if CORRECT in stored else None

    def __call__(self, task: Task) -> Column | None:
        """Measure and store; returns what is right, if it is a probe that says so."""
        number, positions = task.case, task.positions.tolist()
        case, built = self.cases[number], self.built[number]
        model = self.model_for(case)
        with in_mode(model, training=False), rng.preserved():
            # For models that draw random numbers. The label has no part in it: suites share facts.
            rng.reseed("measure", self.job.seed, self.store(case).name, positions[0])
            if isinstance(built, Probe):
                facts, pictures = self._probe(case, built, positions)
            else:
                answer = built(model.given, self.data(case), positions[0], seed=self.job.seed)
                if wrong := [name for name in answer if name in RESERVED or name.startswith(PICTURE)]:
                    raise BastionError(f"study '{case.label}': '{wrong[0]}' is a name that bastion uses itself")
                facts, pictures = {name: torch.as_tensor(value)[None] for name, value in answer.items()}, {}
        columns = {name: column.detach().cpu().numpy() for name, column in facts.items()}
        shown = {name: column.detach().cpu().numpy() for name, column in pictures.items()}
        self.store(case).write(positions, columns, shown, self._origin)
        return columns.get(CORRECT) if case.kind == "probes" else None

    def _probe(self, case: Case, probe: Probe, positions: list[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Facts of all these examples, and pictures of some."""
        data = self.data(case)
        batch = data.split(self.job.split).batch(positions)
        batch = batch.check(len(data.classes), f"measure, probe '{case.label}'")
        model = self.model_for(case)
        answer = probe(model, batch.to(device_of(model)), seed=self.job.seed)
        for name, column in answer.items():
            if name in RESERVED or name.startswith(PICTURE):
                raise BastionError(f"probe '{case.label}': '{name}' is a name that bastion uses itself; choose another")
            if column.ndim == 0 or len(column) != len(positions):
                raise BastionError(
                    f"probe '{case.label}': '{name}' has shape {tuple(column.shape)} for {len(positions)} examples"
                )
        shown = [row for row, position in enumerate(positions) if position in self.job.pictured]
        facts = {name: column for name, column in answer.items() if column.ndim == 1 or name in probe.facts}
        pictures = {name: column[shown] for name, column in answer.items() if name not in facts and shown}
        if pictures:
            pictures[POSITION] = torch.tensor(positions)[shown]
        return {"index": batch.index, "label": batch.y, **facts}, pictures


def _without(positions: Column, stored: Column) -> Column:
    """Both ascend."""
    if not len(stored):
        return positions
    places = np.searchsorted(stored, positions).clip(max=len(stored) - 1)
    left: Column = positions[stored[places] != positions]
    return left


def build_case(case: Case) -> Probe | Study:
    path = f"{case.kind}.{case.base}"
    return probes.build(case.spec, path) if case.kind == "probes" else studies.build(case.spec, path)


def build_data(data: Data, changes: Mapping[str, Any], built: dict[str, DataSet] | None = None) -> DataSet:
    """The data set with these changes to its settings.

    `built` keeps those that were built, without the keys that all data sets take, such as `corruption`: variants that
    differ in these share the images.
    """
    if isinstance(data, DataSet):
        if strange := changes.keys() - datasets.finish_keys():
            raise BastionError(
                f"data: the suite changes {', '.join(sorted(strange))}, so the data set must be given by its name or "
                "settings"
            )
        return datasets.finish(data, changes, "data") if changes else data
    spec = merge({"data": data}, {"data": changes})["data"] if changes else data
    spec = {"name": spec} if isinstance(spec, str) else dict(spec)
    datasets.check(spec, "data")
    last = {key: spec.pop(key) for key in datasets.finish_keys(spec["name"]) & spec.keys()}
    built, name = {} if built is None else built, data_key(spec)
    if name not in built:
        built[name] = datasets.build(spec, "data")
    return datasets.finish(built[name], last, "data") if last else built[name]


def adapted(model: nn.Module, shape: tuple[int, int, int]) -> nn.Module:
    """The model itself if it takes images of this shape, as most CNNs do; else with interpolated positions."""
    if not isinstance(model, Classifier) or shape[1] != shape[2]:
        return model
    try:
        model.check_input(shape, "measure")
    except BastionError:
        return resized(model, shape[1])
    return model


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


def data_key(changes: Mapping[str, Any]) -> str:
    return storage.fingerprint(dict(changes))

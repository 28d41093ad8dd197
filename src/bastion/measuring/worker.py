"""`Worker`: measures one batch of examples, or one part of a study, at a time, and stores it at once."""

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
from bastion.data.split import limited
from bastion.errors import BastionError
from bastion.forward import device_of, in_mode, known_mistake
from bastion.measuring.describe_model import describe_plugins
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
from bastion.suite import CORRECT, SHARES, Case, Suite
from bastion.types import DataSet, Probe, Study, fact_kinds

Data = DataSet | Mapping[str, Any] | str
MOST_BYTES = 64 * 2**20  # of images in a joined batch: large images need no joining to be fast
ROUNDING = 1e-6  # of a share
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
    """Settings of every worker: names rather than objects where possible, as each worker builds its own."""

    model: nn.Module | Path
    data: Data
    split: str
    suite: Suite
    folder: Path  # of the facts of this model and data
    seed: int
    batch_size: int
    pictured: frozenset[int]  # positions of the examples whose pictures are kept
    all_pictures: bool  # whether those that stored facts lack are made
    devices: tuple[str, ...]  # assigned to workers in turn
    acceleration: bool
    names: tuple[str, ...] = ()  # of the cases' stores


@dataclass(frozen=True, kw_only=True)
class BuiltCase(Case):
    """A case of a suite, with its probe or study."""

    number: int  # its place in the suite
    built: Probe | Study


class Worker:
    """Measures one task at a time."""

    def __init__(self, job: Job, model: nn.Module, built: dict[str, DataSet] | None = None) -> None:
        self.job, self._network = job, model
        self._built = {} if built is None else built
        self._data: dict[str, DataSet] = {}  # by the changes of a case
        self._networks: dict[tuple[int, int, int], nn.Module] = {}  # by the shape of images
        self._models: dict[tuple[int, int, int], Accelerated] = {}
        measured = with_columns(model, self._variant(job.suite.data))
        self.model = accelerate(measured, enabled=job.acceleration)  # once for all attacks of all probes
        self._origin = _origin(model, job)
        self.cases = [
            BuiltCase(**vars(case), number=number, built=build_case(case))
            for number, case in enumerate(job.suite.cases())
        ]

    def data(self, case: Case) -> DataSet:
        """Return the case's variant of the data set."""
        return self._variant(case.data)

    def _variant(self, changes: Mapping[str, Any]) -> DataSet:
        key = data_key(changes)
        if key not in self._data:
            self._data[key] = build_data(self.job.data, changes, self._built)
        return self._data[key]

    def network_for(self, case: Case) -> nn.Module:
        """Return the network, adapted to the size of the images if it does not take them and the suite allows it."""
        shape = self.data(case).shape
        if shape not in self._networks:
            self._networks[shape] = adapted(self._network, shape) if self.job.suite.adapt_size else self._network
        return self._networks[shape]

    def model_for(self, case: Case) -> Accelerated:
        """Return the model that attacks and probes of this case get."""
        data, network = self.data(case), self.network_for(case)
        if network is self._network:
            return self.model
        if data.shape not in self._models:
            self._models[data.shape] = accelerate(with_columns(network, data), enabled=self.job.acceleration)
        return self._models[data.shape]

    def store(self, case: BuiltCase) -> FactStore:
        return self.stores[case.number]

    @cached_property
    def stores(self) -> list[FactStore]:
        """The cases' stores, named by a hash of all that the facts depend on besides model and data set."""
        return [FactStore(self.job.folder / self._name(case)) for case in self.cases]

    def sharing(self, number: int) -> list[BuiltCase]:
        """Return the cases that share this one's facts."""
        return [case for case in self.cases if self.store(case) == self.stores[number]]

    def _name(self, case: BuiltCase) -> str:
        named = self._named(case) | {"seed": self.job.seed}
        if isinstance(case.built, Study) and (fixed := self._fixed_parameters()):
            named["fixed"] = fixed
        return storage.fingerprint(named, digits=16)

    def key(self, case: BuiltCase) -> str:
        """Return a hash of what numbers must share to be compared across models: all of the store's but the seed and
        the names of the model's parameters."""
        return storage.fingerprint(self._named(case), digits=16)

    def _named(self, case: BuiltCase) -> dict[str, Any]:
        built = case.built
        named: dict[str, Any] = {case.kind: canonical(built)}
        revisions = built.revisions(self.network_for(case)) if isinstance(built, Probe) else built.revisions
        if any(number != 1 for number in revisions):
            named["versions"] = revisions  # the key in the names of stored facts
        if data_key(case.data) != data_key(self.job.suite.data):
            data = self.data(case)
            named["data"] = [data.fingerprint, data.split(self.job.split).digest()]
        if uses := describe_plugins(built):
            named["uses"] = uses
        if isinstance(built, Study) and (read := self._read_elsewhere(built, self.data(case))):
            named["reads"] = read
        return named

    def _read_elsewhere(self, study: Study, data: DataSet) -> dict[str, str]:
        """Return digests of the images of other splits that a study reads."""
        others = {name: count for name, count in study.reads.items() if name != self.job.split}
        return {name: limited(data.split(name), count).digest() for name, count in others.items()}

    def _fixed_parameters(self) -> list[str]:
        """Return the names of the parameters that are not trained, which facts of studies depend on."""
        return sorted(name for name, each in self._network.named_parameters() if not each.requires_grad)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the cases' stores."""
        return tuple(store.name for store in self.stores)

    def parts(self, case: BuiltCase) -> int:
        """Return the number of parts of a study, 0 for a probe."""
        built = case.built
        return max(1, built.parts(self.model_for(case).original, self.data(case))) if isinstance(built, Study) else 0

    def tasks(self, order: Column) -> list[Task]:
        """Return all tasks: studies first, then the batches in order, each with all probes.

        Equal cases share their facts, and are measured once.
        """
        first = {self.store(case): case for case in reversed(self.cases)}
        distinct = [case for case in self.cases if case is first[self.store(case)]]
        studies = [Task(case.number, part, np.array([part])) for case in distinct for part in range(self.parts(case))]
        cut: dict[int, list[Column]] = {}  # by batch size, shared by all probes: a million examples take 8 MB
        probes = [task for case in distinct for task in self._batches(case, order, cut)]
        return studies + sorted(probes, key=lambda task: (task.batch, task.case))

    def _batches(self, case: BuiltCase, order: Column, cut: dict[int, list[Column]]) -> list[Task]:
        """Return the tasks of a probe, none for a study. A joined batch has the number of its first usual batch."""
        if isinstance(case.built, Study):
            return []
        usual = self.job.batch_size
        most = MOST_BYTES // (4 * usual * math.prod(self.data(case).shape))
        size = usual * max(1, min(case.built.batches, most))
        if size not in cut:
            cut[size] = [np.sort(order[start : start + size]) for start in range(0, len(order), size)]
        return [Task(case.number, place * size // usual, positions) for place, positions in enumerate(cut[size])]

    def open_tasks(self, tasks: Iterable[Task]) -> list[Task]:
        """Return the tasks that are not stored yet, with the positions that are missing.

        A batch that lacks pictures which are wanted is open as a whole: so its facts get the same bits again.
        """
        stored = [store.stored([])[POSITION] for store in self.stores]
        pictured = [self._pictured(case) if self.job.all_pictures else None for case in self.cases]
        left = [
            task
            if (shown := pictured[task.case]) is not None and len(_without(task.positions, shown))
            else task._replace(positions=_without(task.positions, stored[task.case]))
            for task in tasks
        ]
        return [task for task in left if len(task.positions)]

    def _pictured(self, case: BuiltCase) -> Column | None:
        """Return the positions of stored pictures; None for a probe that seems to make none."""
        shown = self.store(case).pictured()
        return shown if len(shown) or (isinstance(case.built, Probe) and case.built.makes_pictures) else None

    def right(self, task: Task) -> Column | None:
        """Return the stored column `correct` of a task, as the task itself returned it."""
        stored = self.stores[task.case].stored([CORRECT])
        return stored[CORRECT][np.isin(stored[POSITION], task.positions)] if CORRECT in stored else None

    def __call__(self, task: Task) -> Column | None:
        """Measure and store; return the column `correct`, if it is a probe that has one."""
        case, positions = self.cases[task.case], task.positions.tolist()
        model = self.model_for(case)
        with in_mode(model, training=False), rng.preserved():
            # For models that draw random numbers. Independent of the label, as suites share facts.
            rng.reseed("measure", self.job.seed, self.store(case).name, positions[0])
            if isinstance(case.built, Probe):
                facts, pictures = self._probe(case, case.built, positions)
            else:
                arrays = case.built(model.original, self.data(case), positions[0], seed=self.job.seed)
                if wrong := [name for name in arrays if name in RESERVED or name.startswith(PICTURE)]:
                    raise BastionError(f"study '{case.label}': '{wrong[0]}' is a name that bastion uses itself")
                facts, pictures = {name: torch.as_tensor(value)[None] for name, value in arrays.items()}, {}
        columns = {name: column.detach().cpu().numpy() for name, column in facts.items()}
        shown = {name: column.detach().cpu().numpy() for name, column in pictures.items()}
        self.store(case).write(positions, columns, shown, self._origin)
        return columns.get(CORRECT) if case.kind == "probes" else None

    def _probe(self, case: Case, probe: Probe, positions: list[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return facts of all these examples, and pictures of some."""
        data = self.data(case)
        batch = data.split(self.job.split).batch(positions)
        batch = batch.check(len(data.classes), f"measure, probe '{case.label}'")
        model = self.model_for(case)
        returned = probe(model, batch.to(device_of(model)), seed=self.job.seed)
        for name, column in returned.items():
            if name in RESERVED or name.startswith(PICTURE):
                raise BastionError(f"probe '{case.label}': '{name}' is a name that bastion uses itself; choose another")
            if column.ndim == 0 or len(column) != len(positions):
                raise BastionError(
                    f"probe '{case.label}': '{name}' has shape {tuple(column.shape)} for {len(positions)} examples"
                )
        _check_shares(case.label, probe, returned)
        shown = [row for row, position in enumerate(positions) if position in self.job.pictured]
        facts = {name: column for name, column in returned.items() if column.ndim == 1 or name in probe.facts}
        pictures = {name: column[shown] for name, column in returned.items() if name not in facts and shown}
        if pictures:
            pictures[POSITION] = torch.tensor(positions)[shown]
        return {"index": batch.index, "label": batch.y, **facts}, pictures


def _check_shares(label: str, probe: Probe, returned: Mapping[str, Tensor]) -> None:
    """Raise if a share is none: its mean would have an interval that it is not in."""
    kinds = fact_kinds(probe.facts)
    for name, column in returned.items():
        if kinds.get(name) in SHARES and ((column < 0) | (column > 1 + ROUNDING)).any():
            raise BastionError(
                f"probe '{label}': '{name}' is declared as {kinds[name]}, but has values from "
                f"{column.min().item():.4g} to {column.max().item():.4g}; a share lies between 0 and 1"
            )


def _without(positions: Column, stored: Column) -> Column:
    """Return the positions that are not stored; both are ascending."""
    if not len(stored):
        return positions
    places = np.searchsorted(stored, positions).clip(max=len(stored) - 1)
    left: Column = positions[stored[places] != positions]
    return left


def build_case(case: Case) -> Probe | Study:
    path = f"{case.kind}.{case.base}"
    return probes.build(case.spec, path) if case.kind == "probes" else studies.build(case.spec, path)


def build_data(data: Data, changes: Mapping[str, Any], built: dict[str, DataSet] | None = None) -> DataSet:
    """Build the data set with these changes to its settings.

    `built` caches data sets without the keys that all data sets take, such as `corruption`: variants that differ only
    in these share the images.
    """
    if isinstance(data, DataSet):
        if unknown := changes.keys() - datasets.finish_keys():
            raise BastionError(
                f"data: the suite changes {', '.join(sorted(unknown))}, so the data set must be given by its name or "
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
    """Return the model if it takes images of this shape, as most CNNs do; else interpolate position embeddings."""
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
    """Check that a user's network gives one logit per class for an image of the data."""
    k, shape = len(data.classes), ", ".join(map(str, data.shape))
    expected = f"measure: the model must give float logits (B, {k}) for images (B, {shape}) in [0, 1]"
    images = rng.uniform(0, torch.arange(2), "check", data.shape).to(device_of(model))
    try:
        with torch.no_grad(), in_mode(model, training=False), rng.preserved():
            logits = model(images)
    except Exception as error:
        if known := known_mistake(str(error), model, images):
            raise BastionError(f"measure: {known}; torch says: {error}") from error
        raise BastionError(f"{expected}; it raised {type(error).__name__}: {error}") from error
    if not isinstance(logits, Tensor):
        raise BastionError(f"{expected}; it gave {type(logits).__name__}")
    if logits.shape != (2, k) or not logits.is_floating_point():
        raise BastionError(f"{expected}; for two images it gave {logits.dtype} {tuple(logits.shape)}")


def _origin(model: nn.Module, job: Job) -> dict[str, Any]:
    """Return the provenance: what changes facts by rounding only."""
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

"""Before the first batch: check the request, find model, data, suite and run, and look up what is stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bastion import storage
from bastion.data.user_data import ClassMap, as_data
from bastion.errors import BastionError
from bastion.forward import device_of
from bastion.measuring.convert import convert
from bastion.measuring.find import default_folder
from bastion.measuring.identity import Identity, identify
from bastion.measuring.order import shuffled
from bastion.measuring.stopping import Tally
from bastion.measuring.store import POSITION, Column
from bastion.measuring.worker import Job, Worker, build_data, check_fit, on_device
from bastion.models.columns import num_outputs
from bastion.models.load import as_module, best_device, is_function, locate, timm_model_name
from bastion.run import Run, create_run
from bastion.suite import CORRECT, Case, Suite, load_suite
from bastion.types import DataSet, Probe, Split, Study, fact_kinds

# Survivors of a batch share the model's batches, so larger ones are faster; smaller ones are easier to share out.
BATCH_SIZE = 128
PICTURES = 16  # examples of which pictures are kept

Model = nn.Module | Callable[[Tensor], Tensor] | str | Path  # from pixels to logits, or what names one
SuiteLike = Suite | Mapping[str, Any] | str | Path  # a suite, or what names or makes one


@dataclass(frozen=True)
class Request:
    """The arguments of `measure`."""

    model: Model
    data: Any
    suite: SuiteLike
    changes: Mapping[str, Any] | Iterable[str] | str = ()
    split: str = "test"
    limit: int | None = None
    seed: int = 0
    folder: str | Path | None = None
    batch_size: int = BATCH_SIZE
    keep: int | str = PICTURES
    acceleration: bool = True
    device: str | None = None
    class_map: ClassMap | None = None


@dataclass(frozen=True)
class Plan:
    """All that is known before the first batch."""

    request: Request
    name: str  # of the model
    run: Run
    identity: Identity
    worker: Worker
    unchanged: Suite  # as its file has it
    data: DataSet  # with the changes that the suite makes for all probes
    split: Split
    order: Column  # positions of the examples, as they are measured
    tally: Tally


def make_plan(request: Request, *, shuffle: bool, until: float | None = None, local_rank: int = 0) -> Plan:
    """Check the request, create the run and look up what is stored. Nothing is written before all checks."""
    _check_request(request)
    source = _source(request.model)
    suite, unchanged = _suites(request)
    devices = _devices(source, request.device)
    network = on_device(source, devices[local_rank % len(devices)])
    built: dict[str, DataSet] = {}
    outputs = partial(num_outputs, network)
    data = as_data(request.data, num_classes=outputs, limit=request.limit, class_map=request.class_map)
    base = build_data(data, suite.data, built)
    n = _count(base, request.split, request.limit)
    check_fit(network, base)
    identity = identify(network, base, request.split)
    name = _model_name(source, request.model)
    folder = _run_folder(source, name, identity.weights, request.folder)
    _check_run_is_of(Run(folder), identity.weights)
    order = shuffled(n) if shuffle else np.arange(n)
    job = Job(
        model=source,
        data=data,
        split=request.split,
        suite=suite,
        folder=folder,  # of the run, until that is created
        seed=request.seed,
        batch_size=request.batch_size,
        pictured=frozenset(order[: None if request.keep == "all" else int(request.keep)].tolist()),
        all_pictures=request.keep == "all",
        devices=devices,
        acceleration=request.acceleration,
    )
    worker = Worker(job, network, built)
    for case in worker.cases:
        check_fit(worker.network_for(case), worker.data(case))
        if isinstance(case.built, Probe) and (threat := case.built.describe().threat):
            threat.check_bounds(worker.data(case).shape)
        _check_variant(case, worker.data(case), base, request.split, n)
    _check_aggregates(worker)
    _check_studies(worker)
    if until is not None:
        _check_until(until, worker)
    run = create_run(folder, request.seed)
    storage.remove_leftovers(run.folder)
    convert(run)
    worker.job = replace(job, folder=identity.folder(run))
    worker.job = replace(worker.job, names=worker.names)
    split, tally = base.split(request.split), _tally(worker, base, order)
    return Plan(request, name, run, identity, worker, unchanged, base, split, order, tally)


def _check_request(request: Request) -> None:
    check_integers({"seed": request.seed}, least=None)
    if request.keep != "all":
        check_integers({"keep": request.keep}, least=0)
    check_integers({"limit": request.limit, "batch_size": request.batch_size}, least=1)
    if request.split not in ("train", "val", "test"):
        raise BastionError(f"split: expected train, val or test, got '{request.split}'")
    if isinstance(request.suite, Suite) and request.changes:
        raise BastionError("measure: `changes` are not for a Suite object; pass its name, a file or a mapping")


def _suites(request: Request) -> tuple[Suite, Suite]:
    """Return the suite, and as it is without changes if it is a paper's."""
    if isinstance(request.suite, Suite):
        return request.suite, request.suite
    suite = load_suite(request.suite, request.changes)
    return suite, load_suite(request.suite) if suite.paper else suite


def _tally(worker: Worker, data: DataSet, order: Column) -> Tally:
    """Count what is stored already."""
    probes, suite = [case for case in worker.cases if case.kind == "probes"], worker.job.suite
    aggregates = suite.aggregates_on(data.name)
    worst = {name: suite.members(name).keys() for name, each in aggregates.items() if each.kind == "worst"}
    tally = Tally(order, [case.label for case in probes], worst)
    for case in probes:
        stored = worker.store(case).stored([CORRECT])
        tally.add(case.label, stored[POSITION], stored.get(CORRECT))
    return tally


def suite_name(given: SuiteLike) -> str:
    return Path(given).stem if isinstance(given, str | Path) else "custom"


def _source(model: Model) -> nn.Module | Path:
    """The model itself, or the folder, function or name that each worker loads it from."""
    if not isinstance(model, str | Path):
        return as_module(model)
    if is_function(model) or timm_model_name(model) is not None:
        return Path(model)
    return locate(model)


def _devices(source: nn.Module | Path, wanted: str | None) -> tuple[str, ...]:
    """A model that was given stays where it is; one that is loaded may go to every GPU."""
    if isinstance(source, nn.Module):
        own = device_of(source)
        if wanted is not None and best_device(wanted).type != own.type:
            raise BastionError(f"device: this model is on {own}, and stays there; move it first, with .to('{wanted}')")
        return (str(own),)
    best = best_device(wanted)
    if best.type == "cuda" and best.index is None:
        return tuple(f"cuda:{number}" for number in range(torch.cuda.device_count()))
    return (str(best),)


def _run_folder(source: nn.Module | Path, name: str, weights: str, folder: str | Path | None = None) -> Path:
    """The folder of the run that facts of this model go to."""
    if folder is not None:
        return Path(folder)
    if isinstance(source, Path) and _is_run(source.resolve()):
        return source.resolve().parent
    return default_folder(name, weights)


def _is_run(model_folder: Path) -> bool:
    return model_folder.name == "model" and storage.is_file(model_folder.parent / "provenance.json")


def _model_name(source: nn.Module | Path, given: Model) -> str:
    """What tables and reports call the model: one that was built by name has that name."""
    if isinstance(given, str | Path) and timm_model_name(given) is not None:
        return str(given)
    if isinstance(source, Path):
        folder = source.resolve()
        return folder.parent.name if _is_run(folder) else folder.name
    spec = getattr(source, "spec", None)
    return str(spec["name"]) if isinstance(spec, dict) and "name" in spec else type(source).__name__.lower()


def _check_run_is_of(run: Run, weights: str) -> None:
    """A trained run takes facts of its own model only."""
    card = run.card()
    if run.recipe() is not None and card and card.weights != weights:
        raise BastionError(f"{run.folder}: is the run of another model; give facts of this one another --run")


def _count(data: DataSet, split: str, limit: int | None) -> int:
    available = len(data.split(split))
    if not available:
        raise BastionError(f"split: {data.name} has no images in its {split} split; measure another one with --split")
    if limit is not None and limit > available:
        raise BastionError(f"limit: the {split} split of {data.name} has {available} examples, got {limit}")
    return available if limit is None else limit


def check_integers(given: Mapping[str, object], *, least: int | None) -> None:
    """Raise unless these are whole numbers, or None for a default."""
    for name, value in given.items():
        if value is None and least is not None:
            continue
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or (least is not None and value < least):  # type: ignore[operator]
            bound = "" if least is None else f" of at least {least}"
            raise BastionError(f"{name}: must be a whole number{bound}, got {value!r}")


def check_positive(given: Mapping[str, object]) -> None:
    for name, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < math.inf):  # type: ignore[operator]
            raise BastionError(f"{name}: must be a number above 0, got {value!r}")


def _check_studies(worker: Worker) -> None:
    """Raise unless the data set has the images that studies read, with the changes to all of them that would do."""
    lacking, changes = dict[str, None](), dict[str, None]()  # once each, though a study has variants
    for case in worker.cases:
        built, data, path = case.built, worker.data(case), f"studies.{case.base}"
        sizes = {split: len(data.split(split)) for split in ("train", "val", "test")}
        for split, n in built.reads.items() if isinstance(built, Study) else ():
            if n is None or n <= sizes[split]:
                continue
            lacking[f"{path} takes {n} images of the {split} split, which has {sizes[split]}"] = None
            largest = max((split, *sizes), key=sizes.__getitem__) if hasattr(built, "split") else split
            if largest != split:
                changes[f"{path}.split={largest}"] = None
            if n > sizes[largest] > 0:
                changes[f"{path}.{'images' if hasattr(built, 'images') else 'n'}={sizes[largest]}"] = None
    if lacking:
        ways = f"; change the suite: {' '.join(f'--set {change}' for change in changes)}" if changes else ""
        raise BastionError(f"{worker.data(worker.cases[0]).name}: {'; '.join(lacking)}{ways}")


def _check_until(until: float, worker: Worker) -> None:
    """An interval must be there to become narrow."""
    if until >= 1:
        raise BastionError(f"until: the width of an interval, such as 0.02 for two points, got {until:g}")
    described = [case.built.facts for case in worker.cases if isinstance(case.built, Probe)]
    if any("phase" in fact_kinds(facts).values() for facts in described):
        raise BastionError("until: a two-phase estimate has an interval of its own; use --limit or --budget")
    if not any(CORRECT in facts for facts in described):
        raise BastionError("until: no probe of this suite has an accuracy; use --limit or --budget")


def _check_variant(case: Case, data: DataSet, base: DataSet, split: str, n: int) -> None:
    """Raise unless this variant has the examples of the suite's data: facts are compared by position."""
    _count(data, split, n)
    if data.columns != base.columns:
        raise BastionError(f"{case.kind}.{case.base}.data: its class map is not the suite's; measure it by itself")
    own, others = data.split(split), base.split(split)
    if not (torch.equal(own.index[:n], others.index[:n]) and torch.equal(own.labels[:n], others.labels[:n])):
        raise BastionError(
            f"{case.kind}.{case.base}.data: its first {n} examples are not those of the suite's data in the same "
            "order; measure it by itself"
        )


def _check_aggregates(worker: Worker) -> None:
    """A column that a probe does not have is told before hours are spent, if the probe says which it has."""
    suite = worker.job.suite
    columns = {case.label: case.built.facts for case in worker.cases}
    for name, each in suite.aggregates.items():
        for label in suite.members(name):
            if columns[label] and each.column not in columns[label]:
                raise BastionError(f"aggregates.{name}: the probe '{label}' has no facts '{each.column}'")

"""The one measuring loop: small batches of examples, each stored as soon as it is done, by any number of workers.

A number depends on model, data, probe, seed and batch size alone. Each worker runs on one thread, so worker count,
order and interruptions change no bit; another batch size changes rounding only. What a model that draws
random numbers draws also depends on which examples of a batch were stored before.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from bastion import storage
from bastion.data.given import as_data
from bastion.errors import BastionError
from bastion.forward import device_of
from bastion.measuring.convert import convert
from bastion.measuring.executors import Launched, Work, in_processes, in_this_process
from bastion.measuring.facts import Facts, write_measurement
from bastion.measuring.find import default_folder
from bastion.measuring.guards import warn_if_normalised_input_is_expected
from bastion.measuring.identity import Identity, identify
from bastion.measuring.measurement import PHASES, MeasuredAggregate, MeasuredCase, MeasuredThreat, Measurement
from bastion.measuring.order import Doing, Limits, Pace, Tally, measured_positions, shortened, shuffled, surviving
from bastion.measuring.published import published
from bastion.measuring.store import POSITION, Column
from bastion.measuring.worker import Job, Task, Worker, build_data, check_fit, on_device
from bastion.models.columns import num_outputs
from bastion.models.complexity import parameters
from bastion.models.load import best_device, is_function, load, locate, timm_model_name
from bastion.progress import bar, console
from bastion.registry import canonical
from bastion.run import Run, create_run, environment, usable_cores
from bastion.signals import stoppable
from bastion.suite import CORRECT, Case, Suite, load_suite
from bastion.types import Attack, DataSet, Probe, Split, Study, Tapped

# What survives of a batch shares the model's batches, so larger ones are faster; smaller ones are easier to share out.
BATCH_SIZE = 128
PICTURES = 16  # kept of so many examples
SUITE = 16  # letters of its name in a progress bar

Given = Suite | Mapping[str, Any] | str | Path  # a suite, or what names or makes one


def measure(
    model: nn.Module | str | Path,
    data: Any = "cifar10-mini",
    suite: Given = "demo",
    *,
    changes: Mapping[str, Any] | Iterable[str] | str = (),
    split: str = "test",
    limit: int | None = None,
    until: float | None = None,
    budget: float | None = None,
    workers: int | None = 1,
    seed: int = 0,
    folder: str | Path | None = None,
    batch_size: int = BATCH_SIZE,
    keep: int | str = PICTURES,
    acceleration: bool = True,
    device: str | None = None,
) -> Facts:
    """Measure the first `limit` examples with a suite of probes and studies. What is stored is not measured again.

    `data` is the name of a data set, perhaps with settings (`imagefolder:root=/data/cats,size=160`), a folder of class
    folders, `(x, y)`, a torch Dataset or a DataLoader; `keep` of how many examples adversarial ones are kept, or "all".

    A suite is one that is shipped, a file, or what a file says: `{"probes": {"clean": "accuracy"}}`; `changes` are made
    on top, such as `eps=4/255`. `workers` None: one per GPU, or one per core. Facts go to `folder`; without it to the
    model's own run, or to `runs/` under the model's name. `acceleration` False: attacks run the model just as it is.
    `device` is for models by name: `cpu`, `cuda` or `cuda:1`; without it every GPU is used.

    `until` and `budget` take the examples in random order: `until=0.01` stops when the 95 % interval of every accuracy
    is no wider than that, `budget=30` after 30 minutes. Such an interval is about the accuracy on all the examples and
    holds whenever one stops. Measuring again goes on from there.

    Under torchrun its processes share out the work, each on a device of its own.
    """
    given = _Given(model, data, suite, changes, split, limit, seed, folder, batch_size, keep, acceleration, device)
    _check_numbers({"workers": workers}, least=1)
    _check_positive({"until": until, "budget": budget})
    launched = Launched.join()
    with launched.failing_together() if launched else nullcontext():
        with launched.main_first("set up") if launched else nullcontext():
            plan = _plan(given, shuffles=until is not None or budget is not None, launched=launched)
        if launched:
            launched.check_same("identity", plan.worker.job.folder.name)
        if until is not None:
            _check_until(until, plan.worker)
        limits = Limits(plan.tally, batch_size, until=until, budget=budget)
        done = _execute(plan, plan.worker.tasks(plan.order), limits, workers, launched)
        with launched.main_first("measured") if launched else nullcontext():
            n = limits.count() if limits.is_set else len(plan.order)
            n = launched.agree("examples", n) if launched else n
            return _written(plan, n, anew=done > 0, merge=launched is None or launched.main)


class Shard(NamedTuple):
    """How far a shard is: batches that are open."""

    name: str
    own: int
    total: int  # of every shard

    def __str__(self) -> str:
        own = f"{self.own} of its batches are open; " if self.own else ""
        rest = f"{self.total} batches of all shards are open" if self.total else "all shards are done"
        following = "the same command without --shard when they are done" if self.total else "it without --shard"
        return f"shard {self.name}: {own}{rest}; run {following} for the result"


def measure_shard(
    model: nn.Module | str | Path,
    data: Any = "cifar10-mini",
    suite: Given = "demo",
    *,
    shard: str,
    workers: int | None = 1,
    budget: float | None = None,
    **options: Any,
) -> Shard:
    """Measure a part of what `measure` with the same arguments would: `"2/8"` is the second of eight parts.

    For jobs that know nothing of each other and write to one folder, such as those of a Slurm array. When all of them
    are done, `measure` finds everything stored.
    """
    if dist.is_torchelastic_launched():
        raise BastionError("shard: torchrun shares out the work already; use one of the two")
    number, count = _parse_shard(shard)
    _check_numbers({"workers": workers}, least=1)
    _check_positive({"budget": budget})
    plan = _plan(_Given(model, data, suite, **options), shuffles=False)
    tasks = plan.worker.tasks(plan.order)
    mine = [task for task in tasks if (task.case + task.batch) % count == number - 1]
    _execute(plan, mine, Limits(plan.tally, plan.worker.job.batch_size, until=None, budget=budget), workers)
    return Shard(shard, len(plan.worker.open_tasks(mine)), len(plan.worker.open_tasks(tasks)))


@dataclass(frozen=True)
class _Given:
    """What `measure` was asked for."""

    model: nn.Module | str | Path
    data: Any
    suite: Given
    changes: Mapping[str, Any] | Iterable[str] | str = ()
    split: str = "test"
    limit: int | None = None
    seed: int = 0
    folder: str | Path | None = None
    batch_size: int = BATCH_SIZE
    keep: int | str = PICTURES
    acceleration: bool = True
    device: str | None = None


@dataclass(frozen=True)
class _Plan:
    """All that is known before the first batch."""

    given: _Given
    name: str  # of the model
    run: Run
    identity: Identity
    worker: Worker
    split: Split
    order: Column  # positions of the examples, as they are measured
    tally: Tally


def _plan(given: _Given, *, shuffles: bool, launched: Launched | None = None) -> _Plan:
    """Refuse what cannot be measured, make the run, and look up what is stored."""
    _check_numbers({"seed": given.seed}, least=None)
    if given.keep != "all":
        _check_numbers({"keep": given.keep}, least=0)
    _check_numbers({"limit": given.limit, "batch_size": given.batch_size}, least=1)
    if given.split not in ("train", "val", "test"):
        raise BastionError(f"split: expected train, val or test, got '{given.split}'")
    source = _source(given.model)
    if isinstance(given.suite, Suite) and given.changes:
        raise BastionError("measure: `changes` go with the name of a suite, a file or a mapping; a Suite is what it is")
    suite = given.suite if isinstance(given.suite, Suite) else load_suite(given.suite, given.changes)
    devices = _devices(source, given.device)
    network = on_device(source, devices[launched.local_rank % len(devices) if launched else 0])
    built: dict[str, DataSet] = {}
    data = as_data(given.data, num_classes=partial(num_outputs, network), limit=given.limit)
    base = build_data(data, suite.data, built)
    n = _count(base, given.split, given.limit)
    check_fit(network, base)
    identity = identify(network, base, given.split)
    name = name_of(source, given.model)
    run = create_run(home(source, name, identity.weights, given.folder), given.seed)
    _check_home(run, identity.weights)
    storage.remove_leftovers(run.folder)
    convert(run)
    order = shuffled(n) if shuffles else np.arange(n)
    job = Job(
        model=source,
        data=data,
        split=given.split,
        suite=suite,
        folder=identity.folder(run),
        seed=given.seed,
        batch_size=given.batch_size,
        pictured=frozenset(order[: None if given.keep == "all" else int(given.keep)].tolist()),
        devices=devices,
        acceleration=given.acceleration,
    )
    worker = Worker(job, network, built)
    for case in worker.cases:
        _count(worker.data(case), given.split, n)
        check_fit(worker.network_for(case), worker.data(case))
        if worker.data(case).columns != base.columns:
            raise BastionError(f"{case.kind}.{case.base}.data: its class map is not the suite's; measure it by itself")
        _check_same_examples(case, getattr(worker.data(case), given.split), getattr(base, given.split), n)
    _check_aggregates(worker)
    return _Plan(given, name, run, identity, worker, getattr(base, given.split), order, _tally(worker, order))


def _tally(worker: Worker, order: Column) -> Tally:
    """Of what is stored already."""
    labels = [case.label for case in worker.cases if case.kind == "probes"]
    suite = worker.job.suite
    worst = {name: suite.members(name).keys() for name, each in suite.aggregates.items() if each.kind == "worst"}
    tally = Tally(order, labels, worst)
    for case in worker.cases:
        if case.kind == "probes":
            stored = worker.store(case).stored([CORRECT])
            tally.add(case.label, stored[POSITION], stored.get(CORRECT))
    return tally


def _execute(
    plan: _Plan, tasks: list[Task], limits: Limits, workers: int | None, launched: Launched | None = None
) -> int:
    """Do what of the tasks is not stored yet, until the limits are reached; returns how many were done."""
    worker, todo = plan.worker, plan.worker.open_tasks(tasks)
    for number in {task.case for task in todo}:
        storage.check_writable(worker.store(worker.cases[number]).folder)
    devices = worker.job.devices
    count = min(workers or (len(devices) if devices[0] != "cpu" else usable_cores()), len(todo))
    passes = {number: _passes(built) for number, built in enumerate(worker.built)}
    pace, done = Pace(_examples(tasks), _examples(todo), passes), 0
    studies = {task.key for task in todo if worker.cases[task.case].kind == "studies"}  # that are not done yet
    silent = launched is not None and not launched.main
    if not silent:
        _tell_plans(worker, todo)
        if todo:
            warn_if_normalised_input_is_expected(worker.model.given, plan.split)
    name = shortened(_suite_name(plan.given.suite), SUITE)
    with stoppable() as stop, bar(name, 1, pace.done(), unit="share", silent=silent) as advance:

        def report(task: Task, right: Column | None, seconds: float | None) -> None:
            nonlocal done
            done += 1
            studies.discard(task.key)
            for case in worker.sharing(task.case):
                plan.tally.add(case.label, task.positions, right)
            pace.add(task.case, len(task.positions), seconds)
            note = plan.tally.note(worker.cases[task.case].label, stops=limits.is_set)
            advance(note=note, done=pace.done(), left=pace.seconds_left())

        def moved(doing: Doing) -> None:
            pace.moved(doing)
            note = surviving(worker.cases[doing.case].label, doing.survivors, doing.of)
            advance(note=note, done=pace.done(), left=pace.seconds_left())

        work = Work(todo, stop, report, lambda: limits.time_is_up() or (not studies and limits.is_narrow()), moved)
        if launched:
            launched.run(worker, tasks, work)
        elif count > 1:
            in_processes(worker.job, work, count)
        else:
            in_this_process(worker, work)
    return done


def _passes(built: Probe | Study) -> int:
    """On an example, at most, as far as it is known."""
    attack, described = getattr(built, "attack", None), built.describe() if isinstance(built, Probe) else None
    return attack.passes(described.threat.norm) if isinstance(attack, Attack) and described and described.threat else 1


def _tell_plans(worker: Worker, todo: list[Task]) -> None:
    """What studies will take that are not done yet, to people at a terminal."""
    for number in dict.fromkeys(task.case for task in todo) if console.is_terminal else ():
        case, built = worker.cases[number], worker.built[number]
        told = built.plan(worker.model_for(case).given, worker.data(case)) if isinstance(built, Study) else ""
        if told:
            left = sum(task.case == number for task in todo)
            console.print(f"{case.label}: {told}; {left} of {worker.parts(case)} parts to do", markup=False)


def _examples(tasks: Iterable[Task]) -> Counter[int]:
    """By the number of the case."""
    counts: Counter[int] = Counter()
    for task in tasks:
        counts[task.case] += len(task.positions)
    return counts


def _written(plan: _Plan, n: int, *, anew: bool, merge: bool) -> Facts:
    """The measurement of the first n examples in order."""
    worker = plan.worker
    studies = [case for case in worker.cases if case.kind == "studies"]
    unfinished = [case.label for case in studies if worker.store(case).missing(range(worker.parts(case)))]
    if n == 0 or unfinished:
        what = f"the study '{unfinished[0]}' was done" if unfinished else "every probe had measured a first batch"
        raise BastionError(
            f"measure: the budget ended before {what}; what is done is stored: re-run the same command to go on"
        )
    for case in worker.cases if merge else ():
        worker.store(case).merge()
    return write_measurement(plan.run, _about(plan, n), anew=anew)


def _about(plan: _Plan, n: int) -> Measurement:
    worker, suite = plan.worker, plan.worker.job.suite
    population = len(plan.order) if n < len(plan.order) else None
    origins: list[dict[str, Any]] = []
    cases = []
    for case, built in zip(worker.cases, worker.built, strict=True):
        store = worker.store(case)
        is_probe = isinstance(built, Probe)
        positions = measured_positions(n, population) if is_probe else np.arange(worker.parts(case))
        origins += [origin for origin in store.origins(positions) if origin not in origins]
        described = built.describe() if isinstance(built, Probe) else None
        threat = described.threat if described else None
        cases.append(
            MeasuredCase(
                label=case.label,
                kind=case.kind,
                role=case.role or (built.role if isinstance(built, Probe) else "analysis"),
                store=store.name,
                n=len(positions),
                spec=canonical(built),
                at=case.at,
                data=case.data,
                threat=MeasuredThreat(**asdict(threat)) if threat else None,
                radii=suite.curves.get(case.base, ()),
                adapted_to=None if worker.model_for(case) is worker.model else worker.data(case).shape[1],
                members=described.members if described else (),
                columns=tuple(store.columns()),
                meanings=dict(built.facts),
            )
        )
    return Measurement(
        **environment(worker.job.seed),
        model=plan.name,
        weights=plan.identity.weights,
        parameters=parameters(worker.model.given),
        category=getattr(worker.model.given, "category", None) or "",
        blocks=_block_names(worker.model.given),
        data=plan.identity.data,
        classes=worker.data(worker.cases[0]).classes,
        suite=_suite_name(plan.given.suite),
        n=n,
        population=population,
        cases=tuple(cases),
        aggregates={
            name: MeasuredAggregate(kind=each.kind, members=suite.members(name), column=each.column)
            for name, each in suite.aggregates.items()
        },
        published=published(plan.run.recipe(), suite, cases, plan.identity.data),
        origins=tuple(origins),
    )


def _suite_name(given: Given) -> str:
    return Path(given).stem if isinstance(given, str | Path) else "custom"


def _source(model: nn.Module | str | Path) -> nn.Module | Path:
    """The model itself, or the folder or function that each worker loads it from."""
    if isinstance(model, nn.Module):
        return model
    if is_function(model):
        return Path(model)
    return locate(model) if timm_model_name(model) is None else load(model)


def _block_names(model: nn.Module) -> tuple[str, ...]:
    try:
        return tuple(block.name for block in model.blocks()) if isinstance(model, Tapped) else ()
    except BastionError:  # the family does not declare them
        return ()


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


def home(source: nn.Module | Path, name: str, weights: str, folder: str | Path | None = None) -> Path:
    """The folder of the run that facts of this model go to."""
    if folder is not None:
        return Path(folder)
    if isinstance(source, Path) and _is_run(source.resolve()):
        return source.resolve().parent
    return default_folder(name, weights)


def _is_run(model_folder: Path) -> bool:
    return model_folder.name == "model" and storage.is_file(model_folder.parent / "provenance.json")


def name_of(source: nn.Module | Path, given: nn.Module | str | Path) -> str:
    """What tables and reports call the model: one that was built by name has that name."""
    if isinstance(source, Path):
        folder = source.resolve()
        return folder.parent.name if _is_run(folder) else folder.name
    if not isinstance(given, nn.Module):
        return str(given)
    spec = getattr(source, "spec", None)
    return str(spec["name"]) if isinstance(spec, dict) and "name" in spec else type(source).__name__.lower()


def _check_home(run: Run, weights: str) -> None:
    """A trained run takes facts of its own model only."""
    card = run.card()
    if run.recipe() is not None and card and card.get("weights") != weights:
        raise BastionError(f"{run.folder}: is the run of another model; give facts of this one another --run")


def _count(data: DataSet, split: str, limit: int | None) -> int:
    available = len(getattr(data, split))
    if not available:
        raise BastionError(f"split: {data.name} has no images in its {split} split; measure another one with --split")
    if limit is not None and limit > available:
        raise BastionError(f"limit: the {split} split of {data.name} has {available} examples, got {limit}")
    return available if limit is None else limit


def _check_numbers(given: Mapping[str, object], *, least: int | None) -> None:
    """Whole numbers; None where a setting is left to bastion."""
    for name, value in given.items():
        if value is None and least is not None:
            continue
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or (least is not None and value < least):  # type: ignore[operator]
            bound = "" if least is None else f" of at least {least}"
            raise BastionError(f"{name}: must be a whole number{bound}, got {value!r}")


def _check_until(until: float, worker: Worker) -> None:
    """An interval must be there to become narrow."""
    if until >= 1:
        raise BastionError(f"until: the width of an interval, such as 0.02 for two points, got {until:g}")
    described = [set(built.facts) for built in worker.built if isinstance(built, Probe)]
    if any(facts >= set(PHASES) for facts in described):
        raise BastionError("until: a two-phase estimate has an interval of its own; use --limit or --budget")
    if not any(CORRECT in facts for facts in described):
        raise BastionError("until: no probe of this suite tells an accuracy; use --limit or --budget")


def _check_same_examples(case: Case, own: Split, base: Split, n: int) -> None:
    """Facts of all probes are set beside each other by position."""
    if not (torch.equal(own.index[:n], base.index[:n]) and torch.equal(own.labels[:n], base.labels[:n])):
        raise BastionError(
            f"{case.kind}.{case.base}.data: its first {n} examples are not those of the suite's data in the same "
            "order; measure it by itself"
        )


def _check_aggregates(worker: Worker) -> None:
    """A column that a probe does not have is told before hours are spent, if the probe says which it has."""
    suite = worker.job.suite
    columns = {case.label: built.facts for case, built in zip(worker.cases, worker.built, strict=True)}
    for name, each in suite.aggregates.items():
        for label in suite.members(name):
            if columns[label] and each.column not in columns[label]:
                raise BastionError(f"aggregates.{name}: the probe '{label}' has no facts '{each.column}'")


def _check_positive(given: Mapping[str, object]) -> None:
    for name, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < math.inf):  # type: ignore[operator]
            raise BastionError(f"{name}: must be a number above 0, got {value!r}")


def _parse_shard(text: str) -> tuple[int, int]:
    """`2/8`: the second of eight."""
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= count:
        raise BastionError(f"shard: expected NUMBER/COUNT, such as 2/8 for the second of eight parts, got '{text}'")
    return number, count

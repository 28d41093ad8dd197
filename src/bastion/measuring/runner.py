"""The one measuring loop: small batches of examples, each stored as soon as it is done, by any number of workers.

A number depends on model, data, probe, seed and batch size alone. Each worker runs on one thread, so worker count,
order and interruptions change no bit; another batch size changes rounding only. What a model that draws
random numbers draws also depends on which examples of a batch were stored before.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bastion import storage
from bastion.errors import BastionError, Interrupted
from bastion.measuring.convert import convert
from bastion.measuring.facts import (
    Facts,
    MeasuredAggregate,
    MeasuredCase,
    MeasuredThreat,
    Measurement,
    write_measurement,
)
from bastion.measuring.identity import Identity, device_of, identify, one_thread, read_identity
from bastion.measuring.worker import Data, Job, Task, Worker, build_data, check_fit, data_key, on_device
from bastion.models import checkpoint
from bastion.models.complexity import parameters
from bastion.models.load import best_device, locate
from bastion.progress import Advance, bar
from bastion.registry import canonical
from bastion.run import Run, create_run, environment
from bastion.signals import StopRequest, deaf_children, end_with_parent, stoppable
from bastion.suite import Suite, load_suite
from bastion.types import DataSet, Probe


def measure(
    model: nn.Module | str | Path,
    data: Data = "cifar10-mini",
    suite: Suite | Mapping[str, Any] | str | Path = "demo",
    *,
    changes: Mapping[str, Any] | Iterable[str] | str = (),
    split: str = "test",
    limit: int | None = None,
    workers: int | None = 1,
    seed: int = 0,
    folder: str | Path | None = None,
    batch_size: int = 64,
    keep: int = 16,
    acceleration: bool = True,
) -> Facts:
    """Measure the first `limit` examples with a suite of probes and studies. What is stored is not measured again.

    A suite is one that is shipped, a file, or what a file says: `{"probes": {"clean": "accuracy"}}`; `changes` are made
    on top, such as `eps=4/255`. `workers` None: one per GPU, or one per core. Facts go to `folder`; without it to the
    model's own run, or to `runs/` under the model's name. `acceleration` False: attacks run the model just as it is.
    """
    source = model if isinstance(model, nn.Module) else locate(model)
    if isinstance(suite, Suite) and changes:
        raise BastionError("measure: `changes` go with the name of a suite, a file or a mapping; a Suite is what it is")
    chosen = suite if isinstance(suite, Suite) else load_suite(suite, changes)
    _check_numbers({"seed": seed}, least=None)
    _check_numbers({"keep": keep}, least=0)
    _check_numbers({"limit": limit, "workers": workers, "batch_size": batch_size}, least=1)
    if split not in ("train", "val", "test"):
        raise BastionError(f"split: expected train, val or test, got '{split}'")
    devices = _devices(source)
    network = on_device(source, devices[0])
    base = build_data(data, chosen.data)
    n = _count(base, split, limit)
    check_fit(network, base)
    identity = identify(network, base, split)
    run = create_run(_home(source, folder), seed)
    _check_home(run, identity.weights)
    storage.remove_leftovers(run.folder)
    convert(run)
    job = Job(source, data, split, chosen, identity.folder(run), seed, batch_size, keep, devices, acceleration)
    worker = Worker(job, network, {data_key(chosen.data): base})
    for case in worker.cases:
        _count(worker.data(case), split, n)
        check_fit(network, worker.data(case))
    todo = worker.open_tasks(n)
    count = workers or (len(devices) if devices[0] != "cpu" else os.cpu_count() or 1)
    total = sum(map(len, (worker.positions(case, n) for case in worker.cases)))
    with stoppable() as stop, bar(f"measuring {run.name}", total) as advance:
        advance(total - sum(len(positions) for _, positions in todo))
        if min(count, len(todo)) > 1:
            _in_processes(job, todo, min(count, len(todo)), stop, advance)
        else:
            _in_this_process(worker, todo, stop, advance)
    for case in worker.cases:
        worker.store(case).merge()
    return write_measurement(run, _about(worker, n, source, suite, identity), anew=bool(todo))


def _about(
    worker: Worker, n: int, source: nn.Module | Path, suite: Suite | Mapping[str, Any] | str | Path, identity: Identity
) -> Measurement:
    job, first = worker.job, worker.data(worker.cases[0])
    chosen = job.suite
    origins: list[dict[str, Any]] = []
    cases = []
    for case, built in zip(worker.cases, worker.built, strict=True):
        store, count = worker.store(case), len(worker.positions(case, n))
        origins += [origin for origin in store.origins(count) if origin not in origins]
        described = built.describe() if isinstance(built, Probe) else None
        threat = described.threat if described else None
        cases.append(
            MeasuredCase(
                label=case.label,
                kind=case.kind,
                role=case.role or (built.role if isinstance(built, Probe) else "analysis"),
                store=store.name,
                n=count,
                spec=canonical(built),
                at=case.at,
                threat=MeasuredThreat(**asdict(threat)) if threat else None,
                members=described.members if described else (),
                columns=tuple(store.columns()),
                meanings=dict(built.facts),
            )
        )
    return Measurement(
        **environment(job.seed),
        model=name_of(source),
        weights=identity.weights,
        parameters=parameters(worker.model.given),
        data=identity.data,
        classes=first.classes,
        suite=Path(suite).stem if isinstance(suite, str | Path) else "custom",
        n=n,
        cases=tuple(cases),
        aggregates={
            name: MeasuredAggregate(kind=each.kind, members=chosen.members(name), column=each.column)
            for name, each in chosen.aggregates.items()
        },
        origins=tuple(origins),
    )


def _in_this_process(worker: Worker, todo: Sequence[Task], stop: StopRequest, advance: Advance) -> None:
    with one_thread():
        for done, task in enumerate(todo):
            if stop:
                raise _interrupted(stop, done, len(todo))
            advance(worker(task), note=worker.cases[task[0]].label)


_worker: Worker | BastionError  # one per worker process; why it could not start, if it could not


def _start(job: Job, turns: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    end_with_parent()
    torch.set_num_threads(1)
    global _worker
    try:
        with turns.get_lock():
            device, turns.value = job.devices[turns.value % len(job.devices)], turns.value + 1
        _worker = _make_worker(job, device)
    except BastionError as error:
        _worker = error
    except Exception as error:
        _worker = BastionError(f"measure: a worker process could not start: {type(error).__name__}: {error}")


def _make_worker(job: Job, device: str) -> Worker:
    model, data = on_device(job.model, device), build_data(job.data, job.suite.data)
    if not identify(model, data, job.split).acts_as(read_identity(job.folder)):
        raise BastionError(
            "measure: a worker process has another model or other data: changed on the disk meanwhile, or not the same "
            "after pickling; measure again, or with workers=1"
        )
    return Worker(job, model, {data_key(job.suite.data): data})


def _work(task: Task) -> int:
    if isinstance(_worker, BastionError):
        raise _worker
    return _worker(task)


def _in_processes(job: Job, todo: Sequence[Task], workers: int, stop: StopRequest, advance: Advance) -> None:
    _check_portable(job)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start, (job, context.Value("i", 0)))
    labels = [case.label for case in job.suite.cases()]
    try:
        with deaf_children():  # they start as work is handed in
            pending = {pool.submit(_work, task): task for task in todo}
        while pending:
            if stop:
                raise _interrupted(stop, len(todo) - len(pending), len(todo))
            for future in wait(pending, timeout=0.5, return_when=FIRST_COMPLETED).done:
                number, _ = pending.pop(future)
                advance(future.result(), note=labels[number])
    except BrokenProcessPool as error:
        raise BastionError(
            "measure: a worker process died: killed, out of memory, or started from a script that calls bastion "
            'outside of `if __name__ == "__main__":`; finished batches are stored: re-run the same command to resume, '
            "or use workers=1"
        ) from error
    finally:
        # Whatever is half done is thrown away: a batch is stored whole or not at all.
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        if stop:
            for process in processes:
                process.terminate()


def _interrupted(stop: StopRequest, done: int, total: int) -> Interrupted:
    return Interrupted(
        f"measure: stopped by a signal; {done} of the {total} open batches are stored. Re-run the same command to "
        "resume.",
        stop.received or 0,
    )


def _check_portable(job: Job) -> None:
    """What cannot be sent to another process is told here, not in the middle of starting one."""
    try:
        pickle.dumps(job)
    except Exception as error:
        raise BastionError(
            f"measure: this model or data cannot be sent to worker processes ({error}); use workers=1"
        ) from error


def _devices(source: nn.Module | Path) -> tuple[str, ...]:
    """A model that was given stays where it is; one that is loaded may go to every GPU."""
    if isinstance(source, nn.Module):
        return (str(device_of(source)),)
    best = best_device()
    return tuple(f"cuda:{number}" for number in range(torch.cuda.device_count())) if best.type == "cuda" else ("cpu",)


def _home(source: nn.Module | Path, folder: str | Path | None) -> Path:
    if folder is not None:
        return Path(folder)
    if isinstance(source, Path) and _is_run(source.resolve()):
        return source.resolve().parent
    weights = checkpoint.digest(source) if isinstance(source, nn.Module) else checkpoint.read_card(source).weights
    name = re.sub(r"[^\w.-]+", "-", name_of(source))
    return Path("runs") / f"{name}-{weights[:8]}"


def _is_run(model_folder: Path) -> bool:
    return model_folder.name == "model" and (model_folder.parent / "provenance.json").is_file()


def name_of(source: nn.Module | Path) -> str:
    """What tables and reports call the model."""
    if isinstance(source, nn.Module):
        return type(source).__name__.lower()
    folder = source.resolve()
    return folder.parent.name if _is_run(folder) else folder.name


def _check_home(run: Run, weights: str) -> None:
    """A trained run takes facts of its own model only."""
    card = run.card()
    if run.recipe() is not None and card and card.get("weights") != weights:
        raise BastionError(f"{run.folder}: is the run of another model; give facts of this one another --run")


def _count(data: DataSet, split: str, limit: int | None) -> int:
    available = len(getattr(data, split))
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

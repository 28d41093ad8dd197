"""The one measuring loop: fixed blocks of examples, each stored as soon as it is done, by any number of workers.

A number depends on model, data, probe, seed and block size alone. Each worker runs on one thread, so
worker count, order and interruptions change no bit.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bastion._torchvision  # noqa: F401  (a model that was sent to a worker process imports timm)

# isort: split
import torch
from torch import Tensor, nn

from bastion import rng
from bastion.data import datasets
from bastion.errors import BastionError, Interrupted
from bastion.forward import in_mode
from bastion.measuring import store
from bastion.measuring.store import Column, Facts, ProbeStore
from bastion.measuring.subject import (
    check_fit,
    check_home,
    device_of,
    home_of,
    identify,
    name_of,
    on_device,
    one_thread,
)
from bastion.models.load import locate
from bastion.probes import probes
from bastion.progress import Advance, bar
from bastion.recipe import Suite, load_suite
from bastion.run import create_run, environment
from bastion.signals import StopRequest, deaf_children, end_with_parent, stoppable
from bastion.threat import Threat
from bastion.types import Attack, DataSet, Probe, Split

Task = tuple[str, range]  # a probe's label and a block of examples


@dataclass(frozen=True)
class Plan:
    """What a worker works on, named rather than given where there is a name: each process builds its own."""

    model: nn.Module | Path
    data: DataSet | Mapping[str, Any] | str
    split: str
    suite: Suite
    stores: Mapping[str, ProbeStore]
    identity: Mapping[str, Any]  # what model and data must be in every process
    seed: int
    batch: int
    keep: int  # pictures are kept of so many first examples


def measure(
    model: nn.Module | str | Path,
    data: DataSet | Mapping[str, Any] | str = "cifar10-mini",
    suite: Suite | Mapping[str, Any] | str | Path = "demo",
    *,
    split: str = "test",
    limit: int | None = None,
    workers: int = 1,
    seed: int = 0,
    folder: str | Path | None = None,
    block: int = 64,
    batch: int | None = None,
    keep: int = 16,
) -> Facts:
    """Ask a suite of probes of the first `limit` examples. What is already stored is not asked again.

    A suite is one that is shipped, a file, or what a file says: `{"probes": {"clean": "accuracy"}}`.
    Facts go to `folder`; without it to the model's own run, or to `runs/` under the model's name.
    """
    source = model if isinstance(model, nn.Module) else locate(model)
    network = on_device(source)
    data_set = data if isinstance(data, DataSet) else datasets.build(data, "data")
    questions = suite if isinstance(suite, Suite) else load_suite(suite)
    asked = build_probes(questions)
    _check_whole("seed", seed)
    n = _count(data_set, split, limit, {"block": block, "batch": batch, "workers": workers, "keep": keep})
    check_fit(network, data_set)
    subject = identify(network, data_set, split)
    home = create_run(home_of(source, folder), seed)
    check_home(home, subject["weights"])
    identity = {**subject, "seed": seed, "block": block, "batch": batch or block}
    stores = {label: ProbeStore.open(home, {**identity, "probe": repr(probe)}) for label, probe in asked.items()}
    plan = Plan(source, data, split, questions, stores, subject, seed, batch or block, keep)
    cut = store.blocks(n, block)
    unknown = {
        (stores[label].folder, each): (label, each) for label in asked for each in cut if not stores[label].has(each)
    }
    todo = list(unknown.values())  # probes that are equal share facts, and are asked once
    with stoppable() as stop, bar(f"measuring {home.name}", n * len(asked)) as advance:
        advance(n * len(asked) - sum(len(each) for _, each in todo))
        if min(workers, len(todo)) > 1:
            _in_processes(plan, todo, min(workers, len(todo)), stop, advance)
        else:
            _in_this_process(plan, network, data_set, todo, stop, advance)
    about = {
        **environment(seed),
        **identity,
        "model": name_of(source),
        "classes": list(data_set.classes),
        "suite": Path(suite).stem if isinstance(suite, str | Path) else "custom",
        "n": n,
        "probes": {label: each.folder.name for label, each in stores.items()},
        "described": {label: repr(probe) for label, probe in asked.items()},
        "threats": {label: asdict(threat) for label, probe in asked.items() if (threat := _threat(probe))},
        "members": {label: members for label, probe in asked.items() if (members := _members(probe))},
    }
    return store.read_measurement(home, store.write_measurement(home, about, anew=bool(todo)))


class Worker:
    """Measures one block at a time, on one thread."""

    def __init__(self, plan: Plan, model: nn.Module, data: DataSet) -> None:
        self.plan, self.model = plan, model
        self.probes = build_probes(plan.suite)
        self.split: Split = getattr(data, plan.split)
        self.num_classes = len(data.classes)

    def __call__(self, task: Task) -> int:
        """Measure and store; returns how many examples that was."""
        label, block = task
        parts = [self._ask(label, list(block[i : i + self.plan.batch])) for i in range(0, len(block), self.plan.batch)]
        columns = store.joined([{name: column.cpu().numpy() for name, column in part.items()} for part in parts])
        facts = {name: column for name, column in columns.items() if column.ndim == 1}
        self.plan.stores[label].write(block, facts, self._pictures(block, columns))
        return len(block)

    def _ask(self, label: str, positions: list[int]) -> dict[str, Tensor]:
        batch = self.split.batch(positions).check(self.num_classes, f"measure, probe '{label}'")
        with in_mode(self.model, training=False), rng.preserved():
            # For models that draw random numbers. The label has no part in it: suites share facts.
            rng.reseed("measure", self.plan.seed, repr(self.probes[label]), positions[0])
            answer = self.probes[label](self.model, batch.to(device_of(self.model)), seed=self.plan.seed)
        for name, column in answer.items():
            if len(column) != len(positions):
                raise BastionError(f"probe '{label}': '{name}' has {len(column)} rows for {len(positions)} examples")
        return {"index": batch.index, "label": batch.y, **answer}

    def _pictures(self, block: range, columns: Mapping[str, Column]) -> dict[str, Column]:
        count = max(0, min(self.plan.keep - block.start, len(block)))
        kept = {name: column[:count] for name, column in columns.items() if column.ndim > 1}
        return {**kept, "index": columns["index"][:count]} if kept and count else {}


def _in_this_process(
    plan: Plan, model: nn.Module, data: DataSet, todo: list[Task], stop: StopRequest, advance: Advance
) -> None:
    worker = Worker(plan, model, data)
    with one_thread():
        for position, task in enumerate(todo):
            if stop:
                raise _interrupted(stop, position, len(todo))
            advance(worker(task), note=task[0])


_worker: Worker | BastionError  # one per worker process; why it could not start, if it could not


def _start(plan: Plan) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    end_with_parent()
    torch.set_num_threads(1)
    global _worker
    try:
        _worker = _make_worker(plan)
    except BastionError as error:
        _worker = error
    except Exception as error:
        _worker = BastionError(f"measure: a worker process could not start: {type(error).__name__}: {error}")


def _make_worker(plan: Plan) -> Worker:
    model = on_device(plan.model)
    data = plan.data if isinstance(plan.data, DataSet) else datasets.build(plan.data, "data")
    if identify(model, data, plan.split) != plan.identity:
        raise BastionError("measure: model or data changed on the disk while they were measured; measure again")
    return Worker(plan, model, data)


def _work(task: Task) -> int:
    if isinstance(_worker, BastionError):
        raise _worker
    return _worker(task)


def _in_processes(plan: Plan, todo: list[Task], workers: int, stop: StopRequest, advance: Advance) -> None:
    _check_portable(plan)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start, (plan,))
    try:
        with deaf_children():  # they start as work is handed in
            pending = {pool.submit(_work, task): task for task in todo}
        while pending:
            if stop:
                raise _interrupted(stop, len(todo) - len(pending), len(todo))
            for future in wait(pending, timeout=0.5, return_when=FIRST_COMPLETED).done:
                label, _ = pending.pop(future)
                advance(future.result(), note=label)
    except BrokenProcessPool as error:
        raise BastionError(
            "measure: a worker process died: killed, out of memory, or started from a script that calls bastion "
            'outside of `if __name__ == "__main__":`; finished blocks are stored: run again to go on, or with workers=1'
        ) from error
    finally:
        # Whatever is half done is thrown away: a block is stored whole or not at all.
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        if stop:
            for process in processes:
                process.terminate()


def _interrupted(stop: StopRequest, done: int, total: int) -> Interrupted:
    stored = f"{done} of the {total} open blocks are stored"
    return Interrupted(f"measure: stopped by a signal; {stored}: run the same command to go on", stop.received or 0)


def build_probes(suite: Suite) -> dict[str, Probe]:
    return {label: probes.build(spec.plain(), f"probes.{label}") for label, spec in suite.probes.items()}


def _check_portable(plan: Plan) -> None:
    """What cannot be sent to another process is told here, not in the middle of starting one."""
    try:
        pickle.dumps(plan)
    except Exception as error:
        raise BastionError(
            f"measure: this model or data cannot be sent to worker processes ({error}); use workers=1"
        ) from error


def _threat(probe: Probe) -> Threat | None:
    threat = getattr(probe, "threat", None)
    return threat if isinstance(threat, Threat) else None


def _members(probe: Probe) -> list[str]:
    """What the attack of a probe is made of, if it is an ensemble."""
    attack, threat = getattr(probe, "attack", None), _threat(probe)
    return [name for name, _ in attack.named_members(threat.norm)] if isinstance(attack, Attack) and threat else []


def _count(data: DataSet, split: str, limit: int | None, sizes: Mapping[str, int | None]) -> int:
    if split not in ("train", "val", "test"):
        raise BastionError(f"split: expected train, val or test, got '{split}'")
    for name, size in {**sizes, "limit": limit}.items():
        if size is not None:
            _check_whole(name, size, least=0 if name == "keep" else 1)
    available = len(getattr(data, split))
    if limit is not None and limit > available:
        raise BastionError(f"limit: the {split} split of {data.name} has {available} examples, got {limit}")
    return available if limit is None else limit


def _check_whole(name: str, value: object, least: int | None = None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or (least is not None and value < least):  # type: ignore[operator]
        bound = "" if least is None else f" of at least {least}"
        raise BastionError(f"{name}: must be a whole number{bound}, got {value!r}")

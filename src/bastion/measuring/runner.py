"""The one measuring loop: fixed blocks of examples, each stored as soon as it is done, by any number of workers.

A number depends on model, data, probe, seed and block size alone. Each worker runs on one thread, so
worker count, order and interruptions change no bit.
"""

from __future__ import annotations

import multiprocessing
import re
import signal
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bastion import rng, storage
from bastion.data import datasets
from bastion.errors import BastionError, Interrupted
from bastion.measuring import store
from bastion.measuring.store import Column, Facts, ProbeStore
from bastion.models import Classifier, checkpoint
from bastion.models.classifier import in_mode
from bastion.models.load import best_device, load, locate
from bastion.probes import probes
from bastion.probes.adversarial import Adversarial
from bastion.progress import Advance, bar
from bastion.recipe import Suite, load_suite
from bastion.run import create_run, environment, version
from bastion.signals import StopRequest, stoppable
from bastion.types import DataSet, Probe, Split

Task = tuple[str, range]  # a probe's label and a block of examples


@dataclass(frozen=True)
class Plan:
    """What a worker works on, named rather than given where there is a name: each process builds its own."""

    model: nn.Module | Path
    data: DataSet | Mapping[str, Any] | str
    split: str
    suite: Suite
    stores: Mapping[str, ProbeStore]
    seed: int
    batch: int
    keep: int  # pictures are kept of so many first examples


def measure(
    model: nn.Module | str | Path,
    data: DataSet | Mapping[str, Any] | str = "cifar10-mini",
    suite: Suite | str | Path = "demo",
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

    Facts go to `folder`; without it to the model's own run, or to `runs/` under the model's name.
    """
    source = model if isinstance(model, nn.Module) else locate(model)
    network = _on_device(source)
    data_set = data if isinstance(data, DataSet) else datasets.build(data, "data")
    questions = suite if isinstance(suite, Suite) else load_suite(suite)
    asked = build_probes(questions)
    n = _count(data_set, split, limit)
    _check_fit(network, data_set)
    home = create_run(_home(source, folder), seed)
    identity = {**_identity(network, data_set, split), "seed": seed, "block": block, "batch": batch or block}
    stores = {label: ProbeStore.open(home, {**identity, "probe": repr(probe)}) for label, probe in asked.items()}
    plan = Plan(source, data, split, questions, stores, seed, batch or block, keep)
    cut = store.blocks(n, block)
    todo = [(label, each) for label in asked for each in cut if not stores[label].has(each)]
    with stoppable() as stop, bar(f"measuring {home.name}", n * len(asked)) as advance:
        advance(n * len(asked) - sum(len(each) for _, each in todo))
        if min(workers, len(todo)) > 1:
            _in_processes(plan, todo, min(workers, len(todo)), stop, advance)
        else:
            _in_this_process(Worker(plan, network, data_set), todo, stop, advance)
    about = {
        **environment(seed),
        **identity,
        "model": home.name,
        "classes": list(data_set.classes),
        "suite": "custom" if isinstance(suite, Suite) else Path(suite).stem,
        "n": n,
        "probes": {label: each.folder.name for label, each in stores.items()},
        "described": {label: repr(probe) for label, probe in asked.items()},
        "threats": {label: asdict(probe.threat) for label, probe in asked.items() if isinstance(probe, Adversarial)},
    }
    return store.read_measurement(home, store.write_measurement(home, about))


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
        columns = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}
        facts = {name: column.numpy() for name, column in columns.items() if column.ndim == 1}
        self.plan.stores[label].write(block, facts, self._pictures(block, columns))
        return len(block)

    def _ask(self, label: str, positions: list[int]) -> dict[str, Tensor]:
        batch = self.split.batch(positions).check(self.num_classes, f"measure, probe '{label}'")
        with in_mode(self.model, training=False), rng.preserved():
            rng.reseed("measure", self.plan.seed, label, positions[0])  # for models that draw random numbers
            device = next(iter(self.model.state_dict().values()), batch.x).device
            answer = self.probes[label](self.model, batch.to(device), seed=self.plan.seed)
        for name, column in answer.items():
            if len(column) != len(positions):
                raise BastionError(f"probe '{label}': '{name}' has {len(column)} rows for {len(positions)} examples")
        return {"index": batch.index, "label": batch.y, **answer}

    def _pictures(self, block: range, columns: Mapping[str, Tensor]) -> dict[str, Column]:
        count = max(0, min(self.plan.keep - block.start, len(block)))
        kept = {name: column[:count] for name, column in columns.items() if column.ndim > 1}
        return {name: column.numpy() for name, column in kept.items()} if count else {}


def _in_this_process(worker: Worker, todo: list[Task], stop: StopRequest, advance: Advance) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for position, task in enumerate(todo):
            if stop:
                raise _interrupted(stop, position, len(todo))
            advance(worker(task), note=task[0])
    finally:
        torch.set_num_threads(threads)


_worker: Worker  # one per worker process


def _start(plan: Plan) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    torch.set_num_threads(1)
    global _worker
    data = plan.data if isinstance(plan.data, DataSet) else datasets.build(plan.data, "data")
    _worker = Worker(plan, _on_device(plan.model), data)


def _on_device(model: nn.Module | Path) -> nn.Module:
    """A model that was given stays where it is."""
    return model if isinstance(model, nn.Module) else load(model).to(best_device())


def _work(task: Task) -> int:
    return _worker(task)


def _in_processes(plan: Plan, todo: list[Task], workers: int, stop: StopRequest, advance: Advance) -> None:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start, (plan,))
    try:
        pending = {pool.submit(_work, task): task for task in todo}
        while pending:
            if stop:
                raise _interrupted(stop, len(todo) - len(pending), len(todo))
            for future in wait(pending, timeout=0.5, return_when=FIRST_COMPLETED).done:
                label, _ = pending.pop(future)
                advance(future.result(), note=label)
    except BrokenProcessPool as error:
        raise BastionError(
            "measure: a worker process died (killed, or out of memory); finished blocks are stored: run the same "
            "command again to go on, with fewer --workers or a smaller --batch if memory ran out"
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


def _count(data: DataSet, split: str, limit: int | None) -> int:
    if split not in ("train", "val", "test"):
        raise BastionError(f"split: expected train, val or test, got '{split}'")
    if limit is not None and limit < 1:
        raise BastionError(f"limit: must be at least 1, got {limit}")
    available = len(getattr(data, split))
    return min(limit or available, available)


def _check_fit(model: nn.Module, data: DataSet) -> None:
    if not isinstance(model, Classifier):
        return  # a network of the user's own: its logits are checked by what comes out
    if model.num_classes != len(data.classes):
        raise BastionError(
            f"measure: the model has {model.num_classes} classes, {data.name} has {len(data.classes)}; "
            "measure it on the data it was trained for"
        )
    model.check_input(data.shape, f"measure on {data.name}")


def _identity(model: nn.Module, data: DataSet, split: str) -> dict[str, Any]:
    """What facts depend on, besides the probe, the seed and how examples are cut."""
    known = isinstance(model, Classifier) and model.spec
    network = [model.spec, model.shape, model.resize] if known else repr(model)
    return {
        "weights": checkpoint.digest(model),
        "network": storage.fingerprint(network),
        "data": {"name": data.name, "fingerprint": data.fingerprint},
        "split": split,
        "version": version("bastion"),
    }


def _home(source: nn.Module | Path, folder: str | Path | None) -> Path:
    if folder is not None:
        return Path(folder)
    if isinstance(source, nn.Module):
        return Path("runs") / f"{type(source).__name__.lower()}-{checkpoint.digest(source)[:8]}"
    if source.name == "model" and (source.parent / "provenance.json").is_file():
        return source.parent
    return Path("runs") / re.sub(r"[^\w.-]+", "-", source.name)

"""Runs the tasks of a measurement: in this process, in worker processes of one thread each, or under torchrun.

Each worker stores its results; `Work.done` is called for every stored task, and `Work.enough` tells when to stop.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

from bastion import journal, torchrun
from bastion.errors import BastionError, Interrupted
from bastion.forward import Function
from bastion.measuring.identity import identify, one_thread, read_identity
from bastion.measuring.pace import Doing
from bastion.measuring.store import Column
from bastion.measuring.worker import Job, Task, Worker, build_data, on_device
from bastion.memory import keep_freed_memory
from bastion.signals import StopRequest, end_with_parent, ignoring_interrupts
from bastion.types import DataSet

POLL = 0.2  # seconds


@dataclass(frozen=True)
class Work:
    """Tasks to run, in this order, and callbacks."""

    tasks: Sequence[Task]
    stop: StopRequest
    # Called with a stored task, its column `correct` if it has one, and the seconds it took if known
    done: Callable[[Task, Column | None, float | None], None]
    enough: Callable[[], bool]
    moved: Callable[[Doing], None] = lambda _: None  # called with the progress of a running task

    def interrupted(self, stored: int) -> Interrupted:
        return Interrupted(
            f"measure: stopped by a signal; {stored} of the {len(self.tasks)} open batches are stored. Re-run the same "
            "command to resume.",
            self.stop.received or 0,
        )


def in_this_process(worker: Worker, work: Work) -> None:
    with one_thread():
        for stored, task in enumerate(work.tasks):
            if work.stop:
                raise work.interrupted(stored)
            if work.enough():
                return
            work.done(task, *_timed(worker, task, partial(_move_or_stop, work, stored)))


def _move_or_stop(work: Work, stored: int, doing: Doing) -> None:
    """Stop within a batch, which may take minutes; what it has found so far is dropped."""
    if work.stop:
        raise work.interrupted(stored)
    work.moved(doing)


def _timed(
    worker: Worker, task: Task, moved: Callable[[Doing], None] = lambda _: None, slot: int = 0
) -> tuple[Column | None, float]:
    began = time.monotonic()

    def report(share: float, survivors: int) -> None:
        n = len(task.positions)
        moved(Doing(slot, task.case, share * n, n, survivors, time.monotonic() - began))

    with journal.watched(report):
        return worker(task), time.monotonic() - began


FIELDS = len(Doing._fields)
_slot: int  # number of this worker process
_doing: Any  # shared array, read by the parent: the fields of each worker's `Doing`; idle while `case` is negative
_worker: Worker | BastionError  # of this process, or the error that kept it from starting


def in_processes(job: Job, work: Work, workers: int) -> None:
    _check_portable(job)
    context = _context()
    doing = context.Array("d", [-1.0] * FIELDS * workers)
    pool = ProcessPoolExecutor(workers, context, _start, (job, context.Value("i", 0), doing, dict(os.environ)))
    waiting, pending, stored = deque(work.tasks), dict[Future[tuple[Column | None, float]], Task](), 0
    try:
        while waiting or pending:
            if work.stop:
                raise work.interrupted(stored)
            if work.enough():  # running tasks are finished
                waiting.clear()
                pending = {future: task for future, task in pending.items() if not future.cancel()}
            with ignoring_interrupts():  # processes start as tasks are submitted
                while waiting and len(pending) < 2 * workers:
                    task = waiting.popleft()
                    pending[pool.submit(_work, task)] = task
            for future in wait(pending, timeout=POLL, return_when=FIRST_COMPLETED).done:
                work.done(pending.pop(future), *future.result())
                stored += 1
            _report_progress(doing, work)
    except BrokenProcessPool as error:
        time.sleep(POLL)  # a signal to the whole group may have reached the workers first
        if work.stop:
            raise work.interrupted(stored) from None
        raise BastionError(
            "measure: a worker process died: killed, out of memory, or started from a script that calls bastion "
            'outside of `if __name__ == "__main__":`; finished batches are stored: re-run the same command to resume, '
            "or use workers=1"
        ) from error
    finally:
        # Unfinished batches are dropped: a batch is stored as a whole or not at all.
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        if work.stop:
            for process in processes:
                process.terminate()


def _context() -> BaseContext:
    """Use a fork server that has imported torch where the system has one: importing it takes seconds."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([Worker.__module__])
    return context


def _report_progress(doing: Any, work: Work) -> None:
    """Pass on the progress of all workers."""
    numbers = list(doing)
    for start in range(0, len(numbers), FIELDS):
        worker, case, examples, n, survivors, seconds = numbers[start : start + FIELDS]
        if case >= 0:
            work.moved(Doing(int(worker), int(case), examples, int(n), int(survivors), seconds))


def _start(job: Job, turns: Any, doing: Any, environment: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    end_with_parent()
    os.environ.clear()  # the fork server's may be older
    os.environ.update(environment)
    torch.set_num_threads(1)
    keep_freed_memory()
    global _worker, _slot, _doing
    try:
        with turns.get_lock():
            _slot, _doing, turns.value = turns.value, doing, turns.value + 1
        device = job.devices[_slot % len(job.devices)]
        _worker = _make_worker(job, device)
    except BastionError as error:
        _worker = error
    except Exception as error:
        _worker = BastionError(f"measure: a worker process could not start: {type(error).__name__}: {error}")


def _make_worker(job: Job, device: str) -> Worker:
    built: dict[str, DataSet] = {}
    model, data = on_device(job.model, device), build_data(job.data, job.suite.data, built)
    if not identify(model, data, job.split).acts_as(read_identity(job.folder)):
        raise BastionError(
            "measure: a worker process has another model or other data: changed on the disk meanwhile, or not the same "
            "after pickling; measure again, or with workers=1"
        )
    worker = Worker(job, model, built)
    if worker.names != job.names:
        raise BastionError(
            "measure: a plug-in uses other code or other values in a worker process, such as globals that were set "
            "after importing it, or files that were edited meanwhile; measure again, or with workers=1"
        )
    return worker


def _work(task: Task) -> tuple[Column | None, float]:
    if isinstance(_worker, BastionError):
        raise _worker
    start = _slot * FIELDS % len(_doing)  # a process that replaces a dead one has a higher number

    def write(doing: Doing) -> None:
        _doing[start : start + FIELDS] = doing

    try:
        return _timed(_worker, task, write, _slot)
    finally:
        _doing[start + 1] = -1.0


def _check_portable(job: Job) -> None:
    """Refuse models, data and plug-ins that cannot be sent to another process, before one is started."""
    parts = list(job.model.modules()) if isinstance(job.model, nn.Module) else []
    functions = [each.function for each in parts if isinstance(each, Function)]
    given = (*parts, *functions, job.data, *_plugins([case.spec for case in job.suite.cases()]))
    typed = [each for each in given if getattr(each, "__module__", None) == "__main__"]
    if typed and not hasattr(sys.modules["__main__"], "__file__"):
        name = getattr(typed[0], "__name__", type(typed[0]).__name__)
        raise BastionError(
            f"measure: {name} is defined in a notebook or a console, from where worker processes cannot import it; "
            "put it into a .py file and import it, or use workers=1"
        )
    try:
        pickle.dumps(job)
    except Exception as error:
        raise BastionError(
            f"measure: this model, data or suite cannot be sent to worker processes ({error}); use workers=1"
        ) from error


def _plugins(spec: Any) -> Iterator[Any]:
    """Yield the values of a spec at any depth: among them attacks and probes that were given as objects."""
    if isinstance(spec, list | tuple | Mapping):
        for each in spec.values() if isinstance(spec, Mapping) else spec:
            yield from _plugins(each)
        return
    yield spec
    if is_dataclass(spec):
        yield from _plugins([getattr(spec, each.name) for each in fields(spec)])


class Processes:
    """The processes started by torchrun, which share out the tasks through its store; without it, this one alone.

    They list the same tasks and each takes the next number of a common counter. If one dies, torchrun restarts all of
    them (`--max-restarts`); stored tasks are not repeated.
    """

    _calls = itertools.count()

    def __init__(self) -> None:
        self.alone, self.rank, self.local_rank = not dist.is_torchelastic_launched(), 0, 0
        if not self.alone:
            store, self.rank, _ = torchrun.join()
            self.local_rank = int(os.environ["LOCAL_RANK"])
            self._store = PrefixStore(f"measure {next(self._calls)}", store)

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which writes shared files and prints."""
        return self.rank == 0

    def agree(self, name: str, value: str) -> str:
        """Return the main process's value."""
        if self.alone:
            return value
        if self.main:
            self._store.set(name, value)
        self._await(name)
        agreed: str = self._store.get(name).decode()
        return agreed

    @contextmanager
    def main_first(self, name: str) -> Iterator[None]:
        """Run the body in the main process first, then in the others."""
        if not self.main:
            self._await(name)
        yield
        if self.main and not self.alone:
            self._store.set(name, "1")

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Tell the other processes if the body fails, so that none of them waits for this one."""
        try:
            yield
        except BaseException:
            if not self.alone:
                self._store.set("failed", str(self.rank))
            raise

    def check_same(self, name: str, value: str) -> None:
        """Raise if this process's value differs from the main one's."""
        if (theirs := self.agree(name, value)) != value:
            raise BastionError(
                f"measure: process {self.rank} has another {name} than process 0 ({value} and {theirs}): another "
                "model, other data or plug-ins, or another version of them"
            )

    def run(self, worker: Worker, tasks: Sequence[Task], work: Work) -> None:
        """Run `work.tasks`, the ones of `tasks` that are not stored yet, together with the other processes."""
        todo = {task.key: task for task in work.tasks}
        taken: dict[str, Task] = {}  # by any process, and not known to be done
        first = 0
        with one_thread():
            while (number := self._store.add("next", 1) - 1) < len(tasks) and not self._enough(work):
                if work.stop:
                    raise work.interrupted(len(work.tasks) - len(todo))
                if (task := todo.get(tasks[number].key)) is not None:
                    self._store.set(f"right {task.key}", _packed(task, *_timed(worker, task, work.moved)))
                keys = [each.key for each in tasks[first : number + 1]]
                taken, first = taken | {key: todo[key] for key in keys if key in todo}, number + 1
                self._collect(taken, todo, work)
        if self.main:
            self._wait_for_others(worker, todo, work)

    def _wait_for_others(self, worker: Worker, todo: dict[str, Task], work: Work) -> None:
        taken = dict(todo)
        for polls in itertools.count(1):
            if not todo or self._enough(work):
                return
            if work.stop:
                raise work.interrupted(len(work.tasks) - len(todo))
            self._check_failed()
            time.sleep(POLL)
            self._collect(taken, todo, work)
            if polls % 50 == 0:  # another job may have stored some of the tasks
                still_open = {task.key for task in worker.open_tasks(todo.values())}
                for key in todo.keys() - still_open:
                    work.done(todo[key], worker.right(todo[key]), None)
                    del todo[key], taken[key]

    def _collect(self, taken: dict[str, Task], todo: dict[str, Task], work: Work) -> None:
        """Call `work.done` for the tasks that any process has stored since."""
        for key in list(taken) if self.main else ():
            if self._store.check([f"right {key}"]):
                work.done(*_unpacked(taken[key], self._store.get(f"right {key}").decode()))
                del taken[key], todo[key]

    def _enough(self, work: Work) -> bool:
        if self.main and work.enough():
            self._store.set("enough", "1")
        return bool(self._store.check(["enough"]))

    def _await(self, name: str) -> None:
        while not self._store.check([name]):
            self._check_failed()
            time.sleep(POLL)

    def _check_failed(self) -> None:
        if self._store.check(["failed"]):
            raise BastionError(f"measure: process {self._store.get('failed').decode()} of torchrun has failed")


def _packed(task: Task, right: Column | None, seconds: float) -> str:
    """Encode the result of a task, which may have fewer positions than the main process's task."""
    return json.dumps([task.positions.tolist(), None if right is None else right.tolist(), seconds])


def _unpacked(task: Task, text: str) -> tuple[Task, Column | None, float]:
    positions, right, seconds = json.loads(text)
    return task._replace(positions=np.array(positions)), None if right is None else np.array(right), seconds

"""The one measuring loop: small batches of examples, each stored as soon as it is done, by any number of workers.

A number depends on model, data, probe, seed and batch size alone. Each worker runs on one thread, so worker count,
order and interruptions change no bit; another batch size changes rounding only. What a model that draws
random numbers draws also depends on which examples of a batch were stored before.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from bastion import storage
from bastion.data.user_data import ClassMap
from bastion.errors import BastionError, shortened
from bastion.measuring.executors import Processes, Work, in_processes, in_this_process
from bastion.measuring.facts import Facts, write_measurement
from bastion.measuring.guards import CHECKED, warn_if_normalised_input_is_expected
from bastion.measuring.pace import Doing, Pace
from bastion.measuring.plan import (
    BATCH_SIZE,
    PICTURES,
    Model,
    Plan,
    Request,
    SuiteLike,
    check_integers,
    check_positive,
    make_plan,
    suite_name,
)
from bastion.measuring.record import record
from bastion.measuring.stopping import Limits, surviving
from bastion.measuring.store import Column
from bastion.measuring.worker import Task, Worker
from bastion.progress import bar, console
from bastion.run import usable_cores
from bastion.signals import stoppable
from bastion.threat import Norm
from bastion.types import Probe, Study

NAME_LENGTH = 16  # of a suite, in a progress bar


def measure(
    model: Model,
    data: Any = "cifar10-mini",
    suite: SuiteLike | None = None,
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
    class_map: ClassMap | None = None,
    attacks: Any = (),
    norm: Norm | None = None,
    eps: Any = None,
) -> Facts:
    """Measure the first `limit` examples with a suite of probes and studies. What is stored is not measured again.

    `data` is the name of a data set, perhaps with settings (`imagefolder:root=/data/cats,size=160`), a folder of class
    folders, `(x, y)`, a torch Dataset or a DataLoader; `keep` of how many examples adversarial ones are kept; "all"
    also makes those that were not kept before. `class_map` says which outputs of a model of more classes the labels
    are: `[281, 292]`, `{"cat": 281, "tiger": 292}` or "imagenet".

    Instead of a suite, `demo` by default, `attacks` may be given with `norm` and `eps`, as of `bastion.evaluate`.

    A suite is one that is shipped, a file, what a file says (`{"probes": {"clean": "accuracy"}}`), or the name of one
    probe or study; `changes` are made on top, such as `eps=4/255`. `workers` None: one per GPU, or one per core. Facts
    go to `folder`; without it to the model's own run, or to `runs/` under the model's name. `acceleration` False:
    attacks run the model just as it is. `device` is for models by name: `cpu`, `cuda` or `cuda:1`; without it every GPU
    is used.

    `until` and `budget` take the examples in random order: `until=0.01` stops when the 95 % interval of every accuracy
    is no wider than that, `budget=30` after 30 minutes. Such an interval is about the accuracy on all the examples and
    holds whenever one stops. Measuring again goes on from there.

    Under torchrun its processes share out the work, each on a device of its own.
    """
    wanted = _wanted(suite, attacks, norm, eps)
    request = Request(
        model, data, wanted, changes, split, limit, seed, folder, batch_size, keep, acceleration, device, class_map
    )
    check_integers({"workers": workers}, least=1)
    check_positive({"until": until, "budget": budget})
    processes = Processes()
    with processes.failing_together():
        with processes.main_first("set up"):
            shuffle = until is not None or budget is not None
            plan = make_plan(request, shuffle=shuffle, until=until, local_rank=processes.local_rank)
        processes.check_same("identity", plan.worker.job.folder.name)
        processes.check_same("suite", storage.fingerprint(plan.worker.names))
        limits = Limits(plan.tally, batch_size, until=until, budget=budget)
        done, seconds = _execute(plan, plan.worker.tasks(plan.order), limits, workers, processes)
        with processes.main_first("measured"):
            n = limits.count() if limits.is_set else len(plan.order)
            n = int(processes.agree("examples", str(n)))
            return _write(plan, n, seconds, changed=done > 0, merge=processes.main)


def _wanted(suite: SuiteLike | None, attacks: Any, norm: Norm | None, eps: Any) -> SuiteLike:
    """Return the suite, or one of the attacks."""
    from bastion.measuring.evaluate import attack_list, attack_suite, radii  # which imports this module

    if chosen := attack_list(attacks):
        if suite is not None:
            raise BastionError("measure: attacks make a suite of their own; give them or suite=, not both")
        return attack_suite(chosen, norm or "linf", radii(eps, norm or "linf"))
    if norm is not None or eps is not None:
        raise BastionError("measure: norm and eps go with attacks=; of a suite, changes={'eps': …} sets the eps")
    return "demo" if suite is None else suite


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
    model: Model,
    data: Any = "cifar10-mini",
    suite: SuiteLike = "demo",
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
    check_integers({"workers": workers}, least=1)
    check_positive({"budget": budget})
    plan = make_plan(Request(model, data, suite, **options), shuffle=False)
    tasks = plan.worker.tasks(plan.order)
    mine = [task for task in tasks if (task.case + task.batch) % count == number - 1]
    limits = Limits(plan.tally, plan.worker.job.batch_size, until=None, budget=budget)
    _execute(plan, mine, limits, workers, Processes())
    _merge(plan.worker)
    return Shard(shard, len(plan.worker.open_tasks(mine)), len(plan.worker.open_tasks(tasks)))


def _execute(
    plan: Plan, tasks: list[Task], limits: Limits, workers: int | None, processes: Processes
) -> tuple[int, dict[str, float]]:
    """Run the tasks that are not stored yet until the limits are reached.

    Return how many were run, and seconds per example by label.
    """
    worker, todo = plan.worker, plan.worker.open_tasks(tasks)
    for number in {task.case for task in todo}:
        storage.check_writable(worker.stores[number].folder)
    devices = worker.job.devices
    count = min(workers or (len(devices) if devices[0] != "cpu" else usable_cores()), len(todo))
    passes = {case.number: case.built.describe().passes for case in worker.cases if isinstance(case.built, Probe)}
    pace, done = Pace(_examples(tasks), _examples(todo), passes), 0
    unfinished_studies = {task.key for task in todo if worker.cases[task.case].kind == "studies"}
    if processes.main:
        _print_study_costs(worker, todo)
        if todo:
            first = plan.split.batch(range(min(CHECKED, len(plan.split))))
            warn_if_normalised_input_is_expected(worker.model.original, first)
    name = shortened(suite_name(plan.request.suite), NAME_LENGTH)
    with stoppable() as stop, bar(name, 1, pace.done(), unit="share", silent=not processes.main) as advance:

        def report(task: Task, right: Column | None, seconds: float | None) -> None:
            nonlocal done
            done += 1
            unfinished_studies.discard(task.key)
            for case in worker.sharing(task.case):
                plan.tally.add(case.label, task.positions, right)
            pace.add(task.case, len(task.positions), seconds)
            note = plan.tally.note(worker.cases[task.case].label, stops=limits.is_set)
            advance(note=note, done=pace.done(), left=pace.seconds_left())

        def moved(doing: Doing) -> None:
            pace.moved(doing)
            note = surviving(worker.cases[doing.case].label, doing.survivors, doing.of)
            advance(note=note, done=pace.done(), left=pace.seconds_left())

        def enough() -> bool:
            return limits.time_is_up() or (not unfinished_studies and limits.is_narrow())

        work = Work(todo, stop, report, enough, moved)
        if not processes.alone:
            processes.run(worker, tasks, work)
        elif count > 1:
            in_processes(worker.job, work, count)
        else:
            in_this_process(worker, work)
    timed = pace.seconds_per_example().items()
    return done, {case.label: seconds for number, seconds in timed for case in worker.sharing(number)}


def _print_study_costs(worker: Worker, todo: list[Task]) -> None:
    """At a terminal, say what the studies that are not finished will take."""
    for number, left in Counter(task.case for task in todo).items() if console.is_terminal else ():
        case, built = worker.cases[number], worker.cases[number].built
        cost = built.cost(worker.model_for(case).original, worker.data(case)) if isinstance(built, Study) else ""
        if cost:
            console.print(f"{case.label}: {cost}; {left} of {worker.parts(case)} parts to do", markup=False)


def _examples(tasks: Iterable[Task]) -> Counter[int]:
    """Count the examples of each case, by its number."""
    counts: Counter[int] = Counter()
    for task in tasks:
        counts[task.case] += len(task.positions)
    return counts


def _write(plan: Plan, n: int, seconds: dict[str, float], *, changed: bool, merge: bool) -> Facts:
    """Write the measurement of the first n examples of the order."""
    worker = plan.worker
    studies = [case for case in worker.cases if case.kind == "studies"]
    unfinished = [case.label for case in studies if worker.store(case).missing(range(worker.parts(case)))]
    if n == 0 or unfinished:
        what = f"the study '{unfinished[0]}' was done" if unfinished else "every probe had measured a first batch"
        raise BastionError(
            f"measure: the budget ended before {what}; what is done is stored: re-run the same command to go on"
        )
    if merge:
        _merge(worker)
    return write_measurement(plan.run, record(plan, n, seconds), changed=changed)


def _merge(worker: Worker) -> None:
    """Keep the number of files small; other processes may be writing theirs."""
    for store in worker.stores:
        store.merge()


def _parse_shard(text: str) -> tuple[int, int]:
    """`2/8`: the second of eight."""
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= count:
        raise BastionError(f"shard: expected NUMBER/COUNT, such as 2/8 for the second of eight parts, got '{text}'")
    return number, count

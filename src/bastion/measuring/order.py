"""Order of measuring, early stopping, and the estimate of the remaining time. No torch."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from bastion.measuring.intervals import Estimate, wilson
from bastion.measuring.sampling import confidence_sequence
from bastion.measuring.store import Column

NOTE = 42  # characters beside a progress bar in a terminal of 80


def shuffled(n: int) -> Column:
    """Return 0 to n - 1 in a fixed random order, by hash (SplitMix64); a smaller n keeps the relative order."""
    word = (np.arange(n, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(word ^ (word >> np.uint64(31)), kind="stable")


def measured_positions(n: int, population: int | None) -> Column:
    """Return the first n positions; with a population (stopped early), the first n of it in random order, sorted."""
    return np.arange(n) if population is None else np.sort(shuffled(population)[:n])


@dataclass
class Tally:
    """Counts which examples of each case are measured, and which are correct."""

    order: Column  # positions, in the order of measuring
    cases: Collection[str]  # labels of the probes; an example is complete when all of them have it
    worst: Mapping[str, Collection[str]] = field(default_factory=dict)  # aggregates: correct under all these probes

    def __post_init__(self) -> None:
        self._rank = np.argsort(self.order)
        self._known = {label: np.zeros(len(self.order), bool) for label in self.cases}  # by rank
        self._right: dict[str, Column] = {}

    def add(self, label: str, positions: Sequence[int] | Column, right: Column | None) -> None:
        """Add facts of a case; `right` is None if it has no column `correct`. Studies are ignored."""
        if label not in self._known:
            return
        inside = np.asarray(positions) < len(self.order)
        ranks = self._rank[np.asarray(positions, dtype=np.int64)[inside]]
        self._known[label][ranks] = True
        if right is not None:
            self._right.setdefault(label, np.zeros(len(self.order), bool))[ranks] = right[inside]

    def complete(self) -> int:
        """Return how many examples, from the first in order, every case has measured."""
        unknown = ~np.logical_and.reduce(list(self._known.values()))
        return int(unknown.argmax()) if unknown.any() else len(self.order)

    def note(self, label: str, *, stops: bool) -> str:
        """Return the accuracy so far, for a progress bar; `stops`: with an interval that allows for early stopping."""
        text = ""
        if label in self._right:
            right, known = int(self._right[label].sum()), int(self._known[label].sum())
            now = confidence_sequence(right, known, len(self.order)) if stops else wilson(right, known)
            text = f" {right}/{known} {100 * now.value:.1f} % [{100 * now.low:.1f}, {100 * now.high:.1f}]"
        return _labelled(label, text)

    def intervals(self, n: int) -> dict[str, Estimate]:
        """Return the accuracies after the first n examples, with intervals that are valid at any stopping time."""
        columns = {label: right[:n] for label, right in self._right.items()}
        for name, members in self.worst.items():
            if all(label in columns for label in members):
                columns[name] = np.logical_and.reduce([columns[label] for label in members])
        return {label: confidence_sequence(int(column.sum()), n, len(self.order)) for label, column in columns.items()}


def surviving(label: str, survivors: int, n: int) -> str:
    """Return the survivors so far, for a progress bar, while an attack runs on n examples."""
    return _labelled(label, f": {survivors} of {n} survive")


def _labelled(label: str, text: str) -> str:
    name = re.sub(r" [^ =]+=", " ", label)  # without the names of axes
    return shortened(name, NOTE - len(text)) + text


class Doing(NamedTuple):
    """Progress of a worker's current task."""

    worker: int
    case: int
    examples: float
    of: int  # examples of the task
    survivors: int  # of the attack
    seconds: float


class Pace:
    """Estimates the share of work done and the time left, from the cost of each case so far."""

    def __init__(
        self, total: Mapping[int, int], left: Mapping[int, int], passes: Mapping[int, int] | None = None
    ) -> None:
        """`total` and `left`: examples of each case, or parts of a study, by its number.

        `passes`: most forward passes per example (default 1), the relative cost of a case before it has begun.
        """
        self._total, self._left = total, dict(left)
        self._passes = dict.fromkeys(total, 1) | {case: max(count, 1) for case, count in (passes or {}).items()}
        self._counted, self._seconds = dict.fromkeys(total, 0), dict.fromkeys(total, 0.0)
        self._doing: dict[int, Doing] = {}
        self._began = time.monotonic()

    def add(self, case: int, count: int, seconds: float | None) -> None:
        """Count finished examples; `seconds` of one worker, None if unknown, as for another job's."""
        self._left[case] -= count
        self._doing.clear()  # one of these tasks is done; the other workers report again
        if seconds is not None:
            self._counted[case] += count
            self._seconds[case] += seconds

    def seconds_per_example(self) -> dict[int, float]:
        """Return the mean over the finished examples of each case that has any, with four digits."""
        rates = {case: self._seconds[case] / count for case, count in self._counted.items() if count}
        return {case: float(f"{rate:.4g}") for case, rate in rates.items()}

    def moved(self, doing: Doing) -> None:
        self._doing[doing.worker] = doing

    def _known(self) -> dict[int, tuple[float, float]]:
        """Return the finished examples and their seconds, of every case that has begun."""
        known: dict[int, tuple[float, float]] = {
            case: (count, self._seconds[case]) for case, count in self._counted.items()
        }
        for each in self._doing.values():
            count, seconds = known[each.case]
            known[each.case] = count + each.examples, seconds + each.seconds
        return {case: (count, seconds) for case, (count, seconds) in known.items() if count}

    def _costs(self) -> dict[int, float]:
        """Return seconds per example; cases that have not begun are estimated from their passes."""
        known = self._known()
        passes = sum(count * self._passes[case] for case, (count, _) in known.items())
        rate = sum(seconds for _, seconds in known.values()) / passes if passes else 1.0
        usual = {case: rate * self._passes[case] for case in self._total}
        return usual | {case: seconds / count for case, (count, seconds) in known.items()}

    def _rest(self) -> dict[int, float]:
        rest: dict[int, float] = dict(self._left)
        for each in self._doing.values():
            rest[each.case] = max(rest[each.case] - each.examples, 0)
        return rest

    def done(self) -> float:
        """Return the share of the work that is done."""
        costs = self._costs()
        whole, rest = (sum(costs[case] * count for case, count in each.items()) for each in (self._total, self._rest()))
        return 1 - rest / whole if whole else 1.0

    def seconds_left(self) -> float:
        """Estimate the wall-clock seconds left at the pace so far; inf while nothing is done."""
        seconds = sum(seconds for _, seconds in self._known().values())
        if not seconds:
            return math.inf if any(self._left.values()) else 0.0
        costs = self._costs()
        rest = sum(costs[case] * count for case, count in self._rest().items())
        return rest * (time.monotonic() - self._began) / seconds


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


class Limits:
    """Decides when to stop before all examples are measured.

    `until`: when the 95 % interval of every accuracy is no wider than this. It is tested after each batch in order, so
    the number of workers does not matter. `budget`: minutes.
    """

    def __init__(self, tally: Tally, batch_size: int, *, until: float | None, budget: float | None) -> None:
        self.tally, self.batch_size, self.until = tally, batch_size, until
        self._deadline = None if budget is None else time.monotonic() + 60 * budget
        self._tested, self._reached = 0, False

    @property
    def is_set(self) -> bool:
        return self.until is not None or self._deadline is not None

    def time_is_up(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def is_narrow(self) -> bool:
        self._reached = self._reached or self._becomes_narrow()
        return self._reached

    def count(self) -> int:
        """Return how many examples, from the first in order, the measurement has."""
        return self._tested if self.is_narrow() else self.tally.complete()

    def _becomes_narrow(self) -> bool:
        if self.until is None:
            return False
        complete, total = self.tally.complete(), len(self.tally.order)
        while self._tested < complete:
            following = min(self._tested + self.batch_size, total)
            if following > complete:
                return False
            self._tested = following
            widths = [each.high - each.low for each in self.tally.intervals(following).values()]
            if widths and max(widths) <= self.until:
                return True
        return False

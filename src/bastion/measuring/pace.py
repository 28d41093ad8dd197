"""Estimate of the share of a measurement that is done, and of the time left. No torch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import NamedTuple


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

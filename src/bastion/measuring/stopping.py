"""Counts what is measured, and decides when to stop before all examples are. No torch."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bastion.errors import shortened
from bastion.measuring.intervals import Estimate, wilson
from bastion.measuring.sampling import confidence_sequence
from bastion.measuring.store import Column

NOTE = 42  # characters beside a progress bar in a terminal of 80


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

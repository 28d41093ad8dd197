"""What attacks record besides the images they return: passes, warnings, which member of an ensemble fooled which image.

Attacks write into the open journal; without one, nothing is recorded. As with `torch.no_grad`, a journal is open for
the code inside its `with` block only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

PASSES = {  # the columns of `Journal.passes`, for `Probe.facts`
    "forwards": "forward passes spent on the image",
    "backwards": "backward passes spent on the image",
}


@dataclass
class Journal:
    """Examples are known by their index in the data set."""

    forwards: Counter[int] = field(default_factory=Counter)  # forward passes, by example
    backwards: Counter[int] = field(default_factory=Counter)
    fooled_by: dict[int, int] = field(default_factory=dict)  # by example, the number of the ensemble's member
    # By warning code, the examples concerned; None: all. `measuring/sanity.py` has the texts of the codes.
    notices: dict[str, set[int] | None] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)  # codes that were checked for
    had_gradient: set[int] = field(default_factory=set)  # examples with a search whose first gradient was not zero

    def passes(self, index: Tensor) -> dict[str, Tensor]:
        """Forward and backward passes spent on each of these examples."""
        examples = index.tolist()
        return {
            "forwards": torch.tensor([self.forwards[each] for each in examples]),
            "backwards": torch.tensor([self.backwards[each] for each in examples]),
        }

    def columns(self, index: Tensor, fooled: Tensor, inside: Tensor) -> dict[str, Tensor]:
        """Columns that a probe stores: passes and warnings. `inside`: the returned image is in the threat's set."""
        examples = index.tolist()
        columns = {**self.passes(index), "warning.out-of-budget": ~inside.cpu()}
        for code in sorted(self.checked):
            shown = self.notices.get(code, set())
            columns[f"warning.{code}"] = torch.tensor([shown is None or each in shown for each in examples])
        if "blind-start" in self.checked:  # no warning if another search had a gradient, or if the attack succeeded
            without = torch.tensor([each not in self.had_gradient for each in examples])
            columns["warning.blind-start"] &= ~fooled.cpu() & without
        return columns


_open: ContextVar[Journal | None] = ContextVar("journal", default=None)


@contextmanager
def opened() -> Iterator[Journal]:
    """Open a new journal for the attacks that run inside."""
    fresh = Journal()
    token = _open.set(fresh)
    try:
        yield fresh
    finally:
        _open.reset(token)


def is_open() -> bool:
    return _open.get() is not None


def note(code: str, index: Sequence[int] | None = None) -> None:
    """Warn of the attack's result on these examples (None: all). An empty `index`: checked for, and not found."""
    if (journal := _open.get()) is None:
        return
    journal.checked.add(code)
    if index is not None and len(index) == 0:
        return
    noted = journal.notices.setdefault(code, set())
    journal.notices[code] = None if index is None or noted is None else noted | set(index)


def found_gradient(index: Sequence[int]) -> None:
    """Record that a search on each of these examples started at a nonzero gradient."""
    if (journal := _open.get()) is not None:
        journal.had_gradient.update(index)


def passes(index: Tensor, forwards: Tensor | int, backwards: Tensor | int) -> None:
    """Add passes to the counts of these examples: one number for each, or one for all."""
    if (journal := _open.get()) is not None:
        for taken, counts in ((journal.forwards, forwards), (journal.backwards, backwards)):
            for example, count in zip(index.tolist(), torch.as_tensor(counts).expand(len(index)).tolist(), strict=True):
                taken[example] += count


def differentiated(index: Sequence[int]) -> list[int]:
    """Return the examples for which a backward pass has been recorded."""
    journal = _open.get()
    return [each for each in index if journal is not None and journal.backwards[each] > 0]


def fooled(index: Sequence[int], member: int) -> None:
    """Record which member of an ensemble fooled these examples."""
    if (journal := _open.get()) is not None:
        journal.fooled_by.update(dict.fromkeys(index, member))


# Called with the share of the attack's budget that is spent or saved, and the number of survivors.
OnProgress = Callable[[float, int], None]
INTERVAL = 0.2  # seconds between calls


@dataclass
class _Watch:
    on_progress: OnProgress
    total: int = 0  # most passes on all images of the outermost attack; 0: not known
    images: int = 0  # of the current attack
    budget: int = 0  # its most passes per image
    later: int = 0  # most passes per surviving image of the attacks that follow
    spent: int = 0
    reported: float = 0.0  # time of the last call


_watching: ContextVar[_Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watched(on_progress: OnProgress) -> Iterator[None]:
    """Call `on_progress` a few times a second while attacks run inside."""
    token = _watching.set(_Watch(on_progress))
    try:
        yield
    finally:
        _watching.reset(token)


@contextmanager
def attacking(images: int, budget: int, later: int = 0) -> Iterator[None]:
    """Announce an attack on `images` images, of at most `budget` passes each, and `later` ones after it."""
    watch = _watching.get()
    if watch is None:
        yield
        return
    before = watch.total, watch.images, watch.budget, watch.later, watch.spent
    watch.total = watch.total or images * budget
    watch.images, watch.budget, watch.later, watch.spent = images, budget, watch.later + later, 0
    try:
        yield
    finally:
        watch.total, watch.images, watch.budget, watch.later, watch.spent = before


def budget_if_due() -> int:
    """Return the attack's most passes per image if progress should be reported now, else 0."""
    watch = _watching.get()
    if watch is None or not watch.total or time.monotonic() < watch.reported + INTERVAL:
        return 0
    return watch.budget


def report_progress(left: float, survivors: int) -> None:
    """Report the most passes that are left to this attack, and the number of survivors."""
    if watch := _watching.get():
        watch.reported = time.monotonic()
        watch.on_progress(min(max(1 - (left + survivors * watch.later) / watch.total, 0.0), 1.0), survivors)


def spend(images: int, survivors: Callable[[], int]) -> None:
    """Count a pass on `images` images, by an attack that makes all of its passes on every image."""
    if watch := _watching.get():
        watch.spent += images
        if budget_if_due():
            report_progress(max(watch.images * watch.budget - watch.spent, 0), survivors())

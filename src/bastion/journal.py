"""What attacks record besides the images they return: passes, doubts, which member fooled whom.

Attacks write into the journal that is open; where nobody opened one, it is thrown away. Like `torch.no_grad`, an open
journal belongs to the code inside its `with`, not to the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Journal:
    """Keys are the examples' numbers in their data set."""

    forwards: Counter[int] = field(default_factory=Counter)  # images sent through the model, by example
    backwards: Counter[int] = field(default_factory=Counter)
    fooled_by: dict[int, int] = field(default_factory=dict)  # number of the ensemble's member that did it
    # Codes and the examples that show them, None: all. `measuring/sanity.py` has their texts.
    notices: dict[str, set[int] | None] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)  # codes that were looked for
    had_gradient: set[int] = field(default_factory=set)  # where a search began

    def passes(self, index: Tensor) -> dict[str, Tensor]:
        """Forward and backward passes that were spent on each of these examples."""
        examples = index.tolist()
        return {
            "forwards": torch.tensor([self.forwards[each] for each in examples]),
            "backwards": torch.tensor([self.backwards[each] for each in examples]),
        }

    def columns(self, index: Tensor, fooled: Tensor, inside: Tensor) -> dict[str, Tensor]:
        """What a probe stores of it, example by example, given whom the attack fooled and what was in its budget."""
        examples = index.tolist()
        columns = {**self.passes(index), "warning.out-of-budget": ~inside.cpu()}
        for code in sorted(self.checked):
            shown = self.notices.get(code, set())
            columns[f"warning.{code}"] = torch.tensor([shown is None or each in shown for each in examples])
        if "blind-start" in self.checked:  # another search had a gradient, or was lucky
            without = torch.tensor([each not in self.had_gradient for each in examples])
            columns["warning.blind-start"] &= ~fooled.cpu() & without
        return columns


_open: ContextVar[Journal | None] = ContextVar("journal", default=None)


@contextmanager
def opened() -> Iterator[Journal]:
    """A fresh journal, for all attacks that run inside."""
    fresh = Journal()
    token = _open.set(fresh)
    try:
        yield fresh
    finally:
        _open.reset(token)


def is_open() -> bool:
    return _open.get() is not None


def note(code: str, index: Sequence[int] | None = None) -> None:
    """A doubt about the attack's result: on these examples, or on all of them. On none: it was looked for."""
    if (journal := _open.get()) is None:
        return
    journal.checked.add(code)
    if index is not None and len(index) == 0:
        return
    noted = journal.notices.setdefault(code, set())
    journal.notices[code] = None if index is None or noted is None else noted | set(index)


def found_gradient(index: Sequence[int]) -> None:
    """A search on each of these examples began where its gradient is not zero."""
    if (journal := _open.get()) is not None:
        journal.had_gradient.update(index)


def passes(index: Tensor, forwards: Tensor | int, backwards: Tensor | int) -> None:
    """How many more passes these examples took: each its own number, or all the same."""
    if (journal := _open.get()) is not None:
        for taken, counts in ((journal.forwards, forwards), (journal.backwards, backwards)):
            for example, count in zip(index.tolist(), torch.as_tensor(counts).expand(len(index)).tolist(), strict=True):
                taken[example] += count


def differentiated(index: Sequence[int]) -> list[int]:
    """Those of the examples for which a gradient was taken so far."""
    journal = _open.get()
    return [each for each in index if journal is not None and journal.backwards[each] > 0]


def fooled(index: Sequence[int], member: int) -> None:
    if (journal := _open.get()) is not None:
        journal.fooled_by.update(dict.fromkeys(index, member))

"""The one exception that bastion raises on purpose."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BastionError(Exception):
    """Bad input or a bad surrounding: one line that says what, where and how to mend it."""


class Interrupted(BastionError):
    """A signal stopped the work; everything up to it is stored and can be resumed."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` if something near `word` is known, else the whole list if it is short."""
    word, names = str(word), sorted(known)
    variants = [name for name in names if name.startswith(f"{word}-")]
    if usual := [name for name in variants if name.endswith("-linf")]:  # of a suite for each norm
        return f"; did you mean '{usual[0]}'?"
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6) or [name for name in names if word.startswith(name)]
    if near:
        return f"; did you mean '{near[0]}'?"
    if 0 < len(names) <= 20:
        return f"; known: {', '.join(names)}"
    return ""

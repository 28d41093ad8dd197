"""The one exception that bastion raises on purpose, and text that may be shown to people wherever it comes from."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# What a terminal obeys instead of showing it, what turns the direction of writing, and halves of characters.
_NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
MISSING = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """The text with control characters and escape sequences made harmless; lines and tabs stay."""
    return _NOT_TEXT.sub(MISSING, text.replace("\r\n", "\n"))


class BastionError(Exception):
    """Bad input or a bad surrounding: one line that says what, where and how to mend it."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(printable(message).splitlines()))


class Interrupted(BastionError):
    """A signal stopped the work; everything up to it is stored and can be resumed."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal

    def __reduce__(self) -> tuple[type[Interrupted], tuple[str, int]]:
        """So that it can be sent from one process to another."""
        return Interrupted, (str(self), self.signal)


def shown(value: object, *, quoted: bool = True) -> str:
    """A value in a message: as it is written, or as much of it as can be read."""
    try:
        text = repr(value) if quoted else str(value)
    except (ValueError, RecursionError) as error:  # such as an integer of 5,000 digits
        return f"a {type(value).__name__} ({error})"
    return text if len(text) <= 200 else f"{text[:199]}…"


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` if something near `word` is known, else the whole list if it is short."""
    word, names = str(word)[:200], sorted(known)
    variants = [name for name in names if name.startswith(f"{word}-")]
    if usual := [name for name in variants if name.endswith("-linf")]:  # of a suite for each norm
        return f"; did you mean '{usual[0]}'?"
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6) or [name for name in names if word.startswith(name)]
    if near:
        return f"; did you mean '{near[0]}'?"
    if 0 < len(names) <= 20:
        return f"; known: {', '.join(names)}"
    return ""

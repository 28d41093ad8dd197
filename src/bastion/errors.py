"""BastionError, the exception for bad input, and functions that make text safe to print."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Control characters, bidirectional overrides and surrogates.
_NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
MISSING = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """Replace control characters and escape sequences, except newlines and tabs."""
    return _NOT_TEXT.sub(MISSING, text.replace("\r\n", "\n"))


class BastionError(Exception):
    """Bad input or environment: one line that says what is wrong, where, and how to fix it."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(printable(message).splitlines()))


class Interrupted(BastionError):
    """A signal stopped the work; everything up to it is stored and can be resumed."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal

    def __reduce__(self) -> tuple[type[Interrupted], tuple[str, int]]:
        """Support pickling, to send it between processes."""
        return Interrupted, (str(self), self.signal)


def explain_unknown(told: Callable[[str, object], str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function refuse a keyword that it lacks with `told(name, value)`: what to write instead, or nothing."""

    def checked(function: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(function).parameters

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if unknown := [name for name in kwargs if name not in known]:
                name = unknown[0]
                message = told(name, kwargs[name]) or f"unknown argument '{name}'{did_you_mean(name, known)}"
                raise BastionError(f"{function.__name__}: {message}")
            return function(*args, **kwargs)

        return call

    return checked


def shown(value: object, *, quoted: bool = True) -> str:
    """Format a value for a message, shortened if it is long."""
    try:
        text = repr(value) if quoted else str(value)
    except (ValueError, RecursionError) as error:  # such as an integer of 5,000 digits
        return f"a {type(value).__name__} ({error})"
    return shortened(text, 200)


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: max(length - 1, 0)]}…"


# Attacks that have no counterpart here; what is called alike is something else.
NO_COUNTERPART = {"sparsefool", "newtonfool", "gen", "ead", "ddn", "jsma", "onepixel", "pixle"}

# Names in torchattacks, foolbox, advertorch and AutoAttack, without case and punctuation, and ours.
OTHER_NAMES = {
    "aa": "autoattack",
    "ffgsm": "fgsm-rs",
    "tpgd": "pgd:loss=kl",
    "standard": "autoattack",
    "bim": "pgd",
    "ifgsm": "pgd",
    "basiciterative": "pgd",
    "projectedgradientdescent": "pgd",
    "fastgradient": "fgsm",
    "carliniwagner": "cw",
    "at": "adversarial",
    "pgdat": "adversarial",
    "madry": "adversarial",
    "epsilon": "eps",
    "epsilons": "eps",
    "images": "x",
    "inputs": "x",
    "labels": "y",
    "targets": "y",
    "alpha": "step",
    "stepsize": "step",
    "absstepsize": "step",
    "relstepsize": "rel_step",
    "iters": "steps",
    "nbiter": "steps",
    "niter": "steps",
}


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` if a known name is close, else all known names if they are few.

    Case and punctuation do not count; a name that another library has for it is known too.
    """
    word, names = str(word)[:200], sorted(known)
    variants = [name for name in names if name.startswith(f"{word}-")]
    if usual := [name for name in variants if name.endswith("-linf")]:  # of a suite for each norm
        return f"; did you mean '{usual[0]}'?"
    wanted, plain = _letters(word), {_letters(name): name for name in reversed(names)}
    for letters in (wanted, re.sub("^(linf|l2|l1)|attack$", "", wanted)):  # foolbox: L2CarliniWagnerAttack
        ours = OTHER_NAMES.get(letters, plain.get(letters, ""))
        if ours.partition(":")[0] in names:
            return f"; did you mean '{ours}'?"
        if letters in NO_COUNTERPART:
            return ""
    near = difflib.get_close_matches(wanted, plain, n=1, cutoff=0.6)
    near = near or [name for name in plain if name and wanted.startswith(name)]
    if near:
        return f"; did you mean '{plain[near[0]]}'?"
    if 0 < len(names) <= 20:
        return f"; known: {', '.join(names)}"
    return ""


def _letters(name: str) -> str:
    """Return a name without case and punctuation: `WeightDecay` and `weight_decay` are the same."""
    return re.sub(r"[\W_]+", "", name).lower()

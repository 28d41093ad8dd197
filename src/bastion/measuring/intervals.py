"""Confidence intervals of one column of facts, as a sample of all images there could be. Every aggregate has one, and
its n. `sampling` has those of some of the examples of a split, `paired` those of two models. No torch."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

_Z95 = 1.959963984540054


class Estimate(NamedTuple):
    value: float
    low: float
    high: float
    n: int


def wilson(successes: int, n: int, z: float = _Z95) -> Estimate:
    """Wilson's score interval of a proportion (1927): right at 0 and 1, where the normal one collapses."""
    if n == 0:
        return Estimate(math.nan, 0.0, 1.0, 0)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At p = 0 and p = 1 the bound is the value itself; rounding must not move it past.
    return Estimate(p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)), n)


def clopper_pearson(successes: int, n: int, level: float = 0.95) -> Estimate:
    """The exact interval of a proportion (Clopper and Pearson 1934): never covers less than `level`, mostly more."""
    if n == 0:
        return Estimate(math.nan, 0.0, 1.0, 0)
    tail = (1 - level) / 2
    return Estimate(successes / n, _exact_bound(successes, n, tail), 1 - _exact_bound(n - successes, n, tail), n)


def _exact_bound(successes: int, n: int, tail: float) -> float:
    """The proportion under which so many successes or more have the probability `tail`."""
    low, high = 0.0, 1.0
    if successes == 0:
        return low
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if binomial_tail(successes, n, middle) < tail else (low, middle)
    return low


def binomial_tail(successes: int, n: int, p: float) -> float:
    """P(X ≥ successes) of n draws, for 0 < p < 1."""
    counts = np.arange(successes, n + 1)
    logs = log_choose(log_factorials(n), n, counts) + counts * math.log(p) + (n - counts) * math.log1p(-p)
    return float(np.exp(logs).sum())


@functools.lru_cache(maxsize=4)  # those who invert a tail ask again and again
def log_factorials(n: int) -> np.ndarray[Any, Any]:
    """log 0!, log 1!, …, log n!"""
    table = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    table.setflags(write=False)
    return table


def log_choose(factorials: np.ndarray[Any, Any], n: Any, k: Any) -> Any:
    """log of n over k, for numbers or arrays of them, from a table of `log_factorials`."""
    return factorials[n] - factorials[k] - factorials[n - k]


def mean(values: np.ndarray[Any, Any]) -> Estimate:
    """Mean with a normal interval, over the finite values."""
    values = values[np.isfinite(values)].astype(np.float64)
    n = len(values)
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    half = _Z95 * float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    centre = float(values.mean())
    return Estimate(centre, centre - half, centre + half, n)


def bounded_mean(values: np.ndarray[Any, Any], low: float = 0.0, high: float = 1.0) -> Estimate:
    """Mean of numbers that cannot leave [low, high], such as shares of right answers, over the finite ones.

    The interval is that of Agresti and Coull (1998, "plus four"): the normal one after two more examples at either
    bound. It stays between the bounds, and has a width even if all values are the same.
    """
    found = mean(values)
    if found.n == 0:
        return found._replace(low=low, high=high)
    wider = mean(np.concatenate([values, [low, low, high, high]]))
    return found._replace(low=max(low, min(wider.low, found.value)), high=min(high, max(wider.high, found.value)))


def difference(a: Estimate, b: Estimate) -> Estimate:
    """b less a, of two samples that know nothing of each other, from their intervals (Newcombe 1998, method 10)."""
    value = b.value - a.value
    low = value - math.hypot(b.value - b.low, a.high - a.value)
    high = value + math.hypot(b.high - b.value, a.value - a.low)
    return Estimate(value, low, high, min(a.n, b.n))


def estimate(values: np.ndarray[Any, Any]) -> Estimate:
    """The mean of a column of facts: a proportion if it is of yes and no."""
    return wilson(int(values.sum()), len(values)) if values.dtype == bool else mean(values)

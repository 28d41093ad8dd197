"""Confidence intervals of one column of facts, as a sample of the image distribution. `sampling` has
intervals about a split from some of its examples, `paired` those of differences. No torch."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

_Z95 = 1.959963984540054
# 97.5 % quantiles of Student's t with 1, 2, … degrees of freedom.
_T95 = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157)


class Estimate(NamedTuple):
    value: float
    low: float
    high: float
    n: int

    def __float__(self) -> float:
        return float(self.value)

    def __format__(self, spec: str) -> str:
        """Format the value alone: `f"{accuracy:.2%}"`."""
        return format(self.value, spec) if spec else str(self)


def wilson(successes: int, n: int, z: float = _Z95) -> Estimate:
    """Wilson's score interval of a proportion (1927): valid at 0 and 1, where the normal interval has no width."""
    if n == 0:
        return Estimate(math.nan, 0.0, 1.0, 0)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At p = 0 and p = 1 the bound is the value itself; rounding must not move it past.
    return Estimate(p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)), n)


def clopper_pearson(successes: int, n: int, level: float = 0.95) -> Estimate:
    """Exact interval of a proportion (Clopper and Pearson 1934): covers at least `level`, mostly more."""
    if n == 0:
        return Estimate(math.nan, 0.0, 1.0, 0)
    tail = (1 - level) / 2
    return Estimate(successes / n, _exact_bound(successes, n, tail), 1 - _exact_bound(n - successes, n, tail), n)


def _exact_bound(successes: int, n: int, tail: float) -> float:
    """Return the p with P(X ≥ successes) = tail for X ~ Binomial(n, p)."""
    low, high = 0.0, 1.0
    if successes == 0:
        return low
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if binomial_tail(successes, n, middle) < tail else (low, middle)
    return low


def binomial_tail(successes: int, n: int, p: float) -> float:
    """Return P(X ≥ successes) for X ~ Binomial(n, p), 0 < p < 1."""
    counts = np.arange(successes, n + 1)
    logs = log_choose(log_factorials(n), n, counts) + counts * math.log(p) + (n - counts) * math.log1p(-p)
    return float(np.exp(logs).sum())


@functools.lru_cache(maxsize=4)  # inverting a tail needs the same table many times
def log_factorials(n: int) -> np.ndarray[Any, Any]:
    """log 0!, log 1!, …, log n!"""
    table = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    table.setflags(write=False)
    return table


def log_choose(factorials: np.ndarray[Any, Any], n: Any, k: Any) -> Any:
    """Return the log of the binomial coefficient, for numbers or arrays, from a table of `log_factorials`."""
    return factorials[n] - factorials[k] - factorials[n - k]


def mean(values: np.ndarray[Any, Any]) -> Estimate:
    """Mean of the finite values with Student's interval, which is exact for few values too if they are normal."""
    n = int(np.isfinite(values).sum())
    return _mean(values, student_t(n - 1) if n > 1 else math.inf)


def _mean(values: np.ndarray[Any, Any], quantile: float) -> Estimate:
    values = values[np.isfinite(values)].astype(np.float64)
    n = len(values)
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    half = quantile * float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    centre = float(values.mean())
    return Estimate(centre, centre - half, centre + half, n)


def student_t(freedom: int) -> float:
    """97.5 % quantile of Student's t: for many degrees of freedom Fisher and Cornish's expansion (1960), to 4e-6."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z, v = _Z95, float(freedom)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / v**power for power, term in enumerate(terms, 1))


def bounded_mean(values: np.ndarray[Any, Any], low: float = 0.0, high: float = 1.0) -> Estimate:
    """Mean of the finite values, which lie in [low, high], such as shares of correct predictions.

    The interval is that of Agresti and Coull (1998, "plus four"): the normal one after adding two examples at each
    bound. It stays within the bounds, and has a width even if all values are equal.
    """
    found = _mean(values, _Z95)
    if found.n == 0:
        return found._replace(low=low, high=high)
    wider = _mean(np.concatenate([values, [low, low, high, high]]), _Z95)
    return found._replace(low=max(low, min(wider.low, found.value)), high=min(high, max(wider.high, found.value)))


def difference(a: Estimate, b: Estimate) -> Estimate:
    """b minus a of two independent samples, from their intervals (Newcombe 1998, method 10)."""
    value = b.value - a.value
    low = value - math.hypot(b.value - b.low, a.high - a.value)
    high = value + math.hypot(b.high - b.value, a.value - a.low)
    return Estimate(value, low, high, min(a.n, b.n))


def estimate(values: np.ndarray[Any, Any]) -> Estimate:
    """Mean of a column: with Wilson's interval if it is bool, else Student's."""
    return wilson(int(values.sum()), len(values)) if values.dtype == bool else mean(values)

"""Confidence intervals. Every aggregate carries one, and its n."""

from __future__ import annotations

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


def mean(values: np.ndarray[Any, Any]) -> Estimate:
    """Mean with a normal interval, over the finite values."""
    values = values[np.isfinite(values)].astype(np.float64)
    n = len(values)
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    half = _Z95 * float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    centre = float(values.mean())
    return Estimate(centre, centre - half, centre + half, n)


def estimate(values: np.ndarray[Any, Any]) -> Estimate:
    """The mean of a column of facts: a proportion if it is of yes and no."""
    return wilson(int(values.sum()), len(values)) if values.dtype == bool else mean(values)

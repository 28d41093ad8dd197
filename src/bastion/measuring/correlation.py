"""Do two numbers put models in the same order? No torch."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from bastion.measuring.intervals import Estimate

Column = np.ndarray[Any, Any]
LEAST = 4  # models: with fewer there is no interval


def spearman(a: Column, b: Column, level: float = 0.95) -> Estimate:
    """Rank correlation, ties by their mean rank; interval by Fisher's z with Bonett and Wright's variance (2000).

    Where the order is the same or reversed throughout, the interval is that of one exchange of neighbours, as Fisher's
    z would have no width. NaN if one of the columns is constant.
    """
    n = len(a)
    ranks = [_ranks(np.asarray(each, dtype=np.float64)) for each in (a, b)]
    if n < 2 or any(np.ptp(each) == 0 for each in ranks):
        return Estimate(math.nan, -1.0, 1.0, n)
    value = float(np.clip(np.corrcoef(ranks)[0, 1], -1, 1))
    if n < LEAST:
        return Estimate(value, -1.0, 1.0, n)
    most = 1 - 12 / (n * (n * n - 1))  # one exchange of neighbours
    within = min(most, max(-most, value))
    half = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt((1 + within * within / 2) / (n - 3))
    low, high = math.tanh(math.atanh(within) - half), math.tanh(math.atanh(within) + half)
    return Estimate(value, min(low, value), max(high, value), n)


def _ranks(values: Column) -> Column:
    """From 1; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[place])

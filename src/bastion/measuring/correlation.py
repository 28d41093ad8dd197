"""Rank correlation of two numbers over models. No torch."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from bastion.measuring.intervals import Estimate
from bastion.measuring.store import Column

LEAST = 4  # models that an interval needs


def spearman(a: Column, b: Column, level: float = 0.95) -> Estimate:
    """Spearman's rank correlation, ties by mean rank; interval by Fisher's z with Bonett and Wright's variance (2000).

    Pairs with a NaN are left out. At exactly 1 or -1 Fisher's z would give an interval of no width, so that of one swap
    of neighbours is used. NaN if one of the columns is constant.
    """
    pairs = np.stack([np.asarray(each, dtype=np.float64) for each in (a, b)])
    pairs = pairs[:, ~np.isnan(pairs).any(0)]
    n = pairs.shape[1]
    ranks = [_ranks(each) for each in pairs]
    if n < 2 or any(np.ptp(each) == 0 for each in ranks):
        return Estimate(math.nan, -1.0, 1.0, n)
    value = float(np.clip(np.corrcoef(ranks)[0, 1], -1, 1))
    if n < LEAST:
        return Estimate(value, -1.0, 1.0, n)
    most = 1 - 12 / (n * (n * n - 1))  # the correlation after one swap of neighbours
    within = min(most, max(-most, value))
    half = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt((1 + within * within / 2) / (n - 3))
    low, high = math.tanh(math.atanh(within) - half), math.tanh(math.atanh(within) + half)
    return Estimate(value, min(low, value), max(high, value), n)


def _ranks(values: Column) -> Column:
    """Return ranks from 1; ties get their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[place])

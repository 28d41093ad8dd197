"""Paired comparison of two models on the same examples: difference, interval and McNemar's test. No torch."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from bastion.measuring.intervals import Estimate, binomial_tail, mean
from bastion.measuring.sampling import confidence_sequence, estimate_stopped
from bastion.measuring.store import Column


class Paired(NamedTuple):
    """Comparison of b with a, one value per example each."""

    difference: Estimate  # b less a
    gained: Column  # (n,) bool: only b is right; of real values, b's is higher
    lost: Column  # (n,) bool: only a is right
    p: float | None  # of McNemar's exact test; None for real values, and if measuring stopped early


def paired(a: Column, b: Column, population: int | None = None, bounds: tuple[float, float] | None = None) -> Paired:
    """Compare values in the order of positions; of a measurement that stopped early, with its population."""
    gained, lost = b > a, b < a
    tested = a.dtype == bool and population is None
    p = mcnemar(int(lost.sum()), int(gained.sum())) if tested else None
    return Paired(paired_difference(a, b, population, bounds), gained, lost, p)


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided p-value of McNemar's test (1947), from the examples that only one model gets right."""
    changed = only_a + only_b
    return min(1.0, 2 * binomial_tail(max(only_a, only_b), changed, 0.5)) if changed else 1.0


def paired_difference(
    a: Column, b: Column, population: int | None = None, bounds: tuple[float, float] | None = None
) -> Estimate:
    """Mean of b minus mean of a over the same examples: Tango's interval for bool columns, else Student's.

    With a population, measuring stopped early, and these are its first examples in random order: columns that are bool,
    or lie within bounds, get a confidence sequence.
    """
    if a.dtype != bool or b.dtype != bool:
        difference = b.astype(np.float64) - a.astype(np.float64)
        if population is None or bounds is None:
            return mean(difference)
        width = bounds[1] - bounds[0]
        return estimate_stopped(difference, population, (-width, width))
    gained, lost = int((b & ~a).sum()), int((a & ~b).sum())
    return tango(gained, lost, len(a)) if population is None else difference_sequence(gained, lost, len(a), population)


def difference_sequence(gained: int, lost: int, n: int, population: int, level: float = 0.95) -> Estimate:
    """(gained - lost) / n on a split of `population` examples, after n in random order: valid at any stopping time.

    Each share has a confidence sequence at (1 - level) / 2 (Bonferroni).
    """
    up, down = (confidence_sequence(count, n, population, (1 + level) / 2) for count in (gained, lost))
    return Estimate(up.value - down.value, up.low - down.high, up.high - down.low, n)


def tango(gained: int, lost: int, n: int, level: float = 0.95) -> Estimate:
    """Score interval of (gained - lost) / n (Tango 1998, Statistics in Medicine 17): valid for few changes, or none.

    All differences that the score test with the constrained maximum-likelihood estimate does not reject.
    """
    if n == 0:
        return Estimate(math.nan, -1.0, 1.0, 0)
    z = NormalDist().inv_cdf((1 + level) / 2)
    value = (gained - lost) / n

    def accepted(difference: float) -> bool:
        variance = 2 * _share_lost(difference, gained, lost, n) + difference * (1 - difference)
        return n * (value - difference) ** 2 <= z * z * variance

    bounds = []
    for end in (-1.0, 1.0):
        inside, outside = value, end
        while inside != (middle := (inside + outside) / 2) != outside:
            inside, outside = (middle, outside) if accepted(middle) else (inside, middle)
        bounds.append(inside)
    return Estimate(value, bounds[0], bounds[1], n)


def _share_lost(difference: float, gained: int, lost: int, n: int) -> float:
    """Maximum-likelihood share of examples that only the first model gets right, given the true difference."""
    a, b = 2 * n, (2 * n - gained + lost) * difference - gained - lost
    c = -lost * difference * (1 - difference)
    return (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)

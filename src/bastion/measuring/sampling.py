"""Intervals of the accuracy on a whole split, or after a whole attack, from a random sample of the examples. No torch.

These intervals are about the split itself, not about the image distribution: their width is zero once every example
has been measured.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from bastion.errors import BastionError
from bastion.measuring.intervals import Estimate, bounded_mean, estimate, log_choose, log_factorials, wilson

Column = np.ndarray[Any, Any]


def confidence_sequence(successes: int, n: int, population: int, level: float = 0.95) -> Estimate:
    """Accuracy on a split of `population` examples, after n in random order: valid at any stopping time.

    The prior-posterior-ratio martingale of Waudby-Smith and Ramdas 2020 ("Confidence sequences for sampling without
    replacement"): with probability `level`, prior / posterior < 1 / (1 - level) at the true number of successes, for
    all n at once. Under a uniform prior (beta-binomial with a = b = 1) each number of successes among n is a priori
    equally likely, so prior / posterior = 1 / ((n + 1) likelihood).
    """
    _check("confidence_sequence", successes, n, population)
    factorials = log_factorials(population)
    right = np.arange(successes, population - (n - successes) + 1)  # possible successes in the whole split
    log_likelihood = (
        log_choose(factorials, right, successes)
        + log_choose(factorials, population - right, n - successes)
        - log_choose(factorials, population, n)
    )
    inside = right[math.log(n + 1) + log_likelihood > math.log(1 - level)]
    return _share(successes, n, int(inside[0]), int(inside[-1]), population)


def estimate_stopped(values: Column, population: int | None, bounds: tuple[float, float] | None = None) -> Estimate:
    """Mean of a column of a measurement that stopped early, after the first of `population` examples.

    A bool column gets a confidence sequence, other columns the ordinary interval; so does all if population is None.
    What lies within bounds, such as a share of probes, has an interval within them.
    """
    if values.dtype != bool:
        return estimate(values) if bounds is None else bounded_mean(values, *bounds)
    if population is None:
        return estimate(values)
    return confidence_sequence(int(values.sum()), len(values), population)


def share_lost(lost: int, sample: int, population: int, level: float = 0.95) -> Estimate:
    """Share of a finite population that is lost, from a sample without replacement of fixed size.

    The lower end is certain: what is lost in the sample is lost. The upper end is the exact one-sided limit of Clopper
    and Pearson for the hypergeometric distribution: the most that can be lost such that `lost` or fewer in the sample
    have a probability above 1 - level. As the lower end is never wrong, the whole 1 - level goes to the upper one.
    """
    _check("share_lost", lost, sample, population)
    most = population - _fewest(sample - lost, sample, population, 1 - level)
    return _share(lost, sample, lost, most, population)


def _fewest(successes: int, n: int, population: int, tail: float) -> int:
    """Return the fewest successes in the population with P(X ≥ successes) > tail."""
    low, high = successes, population - (n - successes)
    factorials = log_factorials(population)
    while low < high:
        middle = (low + high) // 2
        if _upper_tail(factorials, successes, n, population, middle) > tail:
            high = middle
        else:
            low = middle + 1
    return low


def _upper_tail(factorials: Column, successes: int, n: int, population: int, right: int) -> float:
    """Return P(X ≥ successes) among n draws from a population with `right` successes."""
    counts = np.arange(max(successes, n - (population - right)), min(n, right) + 1)
    logs = log_choose(factorials, right, counts) + log_choose(factorials, population - right, n - counts)
    return float(np.exp(logs - log_choose(factorials, population, n)).sum())


def _share(successes: int, n: int, low: int, high: int, population: int) -> Estimate:
    """Clip the value to its bounds: successes/n need not be a multiple of 1/population, and may lie just outside."""
    bounds = low / population, high / population
    value = min(max(successes / n, bounds[0]), bounds[1]) if n else math.nan
    return Estimate(value, *bounds, n)


def _check(name: str, successes: int, n: int, population: int) -> None:
    if not 0 <= successes <= n <= population or population == 0:
        raise BastionError(
            f"{name}: expected 0 <= successes <= n <= population, got {successes} of {n} of {population}"
        )


class TwoPhase(NamedTuple):
    """Accuracy after both attacks on these n examples, with the interval due to sampling the survivors."""

    value: float
    low: float
    high: float
    n: int
    population: Estimate  # the same value with an interval about the image distribution


def two_phase(survived: Column, sampled: Column, lost: Column, level: float = 0.95) -> TwoPhase:
    """Accuracy after two attacks, of which the second was run on a random sample of the first one's survivors.

    Bool columns over the same examples: survived the first attack; was attacked by the second; was fooled by it. The
    share of the sample that was fooled estimates the share of all survivors, with the interval of `share_lost`.
    The interval about the population gives half of 1 - level to each source of error (Bonferroni): the union of
    Wilson's intervals at the lowest and the highest accuracy in the sampling interval. It is conservative. If every
    survivor was sampled, it is Wilson's interval.
    """
    if not len(survived) == len(sampled) == len(lost) > 0 or (sampled & ~survived).any() or (lost & ~sampled).any():
        raise BastionError("two_phase: only survivors can be sampled, and only sampled examples can be lost")
    n, survivors, sample, fell = len(survived), int(survived.sum()), int(sampled.sum()), int(lost.sum())
    here = _remaining(fell, sample, survivors, n, level)
    if sample == survivors:
        return TwoPhase(*here, population=wilson(survivors - fell, n, _z(level)))
    each = (1 + level) / 2
    possible = _remaining(fell, sample, survivors, n, each)
    low, high = (wilson(round(n * share), n, _z(each)) for share in (possible.low, possible.high))
    return TwoPhase(*here, population=Estimate(here.value, low.low, high.high, n))


def _remaining(lost: int, sampled: int, survivors: int, n: int, level: float) -> Estimate:
    if survivors == 0:
        return Estimate(0.0, 0.0, 0.0, n)
    share = share_lost(lost, sampled, survivors, level)
    before = survivors / n
    return Estimate(before * (1 - share.value), before * (1 - share.high), before * (1 - share.low), n)


def sample_size(survivors: int, n: int, *, width: float = 0.005, lost_share: float = 0.0) -> int:
    """Return how many survivors to sample so that the interval of `two_phase` is no wider than `width` (in accuracy).

    `lost_share`: expected share of survivors that the second attack fools.
    """
    low, high = 1, survivors
    while low < high:
        sample = (low + high) // 2
        after = _remaining(math.ceil(lost_share * sample), sample, survivors, n, level=0.95)
        low, high = (low, sample) if after.high - after.low <= width else (sample + 1, high)
    return high


def _z(level: float) -> float:
    return NormalDist().inv_cdf((1 + level) / 2)

"""Intervals of the accuracy on a whole split, or after a whole attack, from a random sample of the examples. No torch.

These intervals are about the split itself, not about the image distribution: their width is zero once every example
has been measured.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from bastion.errors import BastionError
from bastion.measuring.intervals import Estimate, bounded_mean, estimate, log_choose, log_factorials, wilson
from bastion.measuring.order import shuffled
from bastion.measuring.store import Column


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


def mean_sequence(
    values: Column, population: int, low: float = 0.0, high: float = 1.0, level: float = 0.95
) -> Estimate:
    """Mean over a split of `population` examples, from the first ones in random order: valid at any stopping time.

    The values, in this order, lie in [low, high]. The hedged bets of Waudby-Smith and Ramdas 2023 ("Estimating means of
    bounded random variables by betting"), without replacement: if m were the mean, the next value would be the mean of
    what is left, on average, and no capital that bets on more or on less than that could grow 2 / (1 - level) times.
    """
    _check("mean_sequence", 0, len(values), population)
    if low == high:
        return Estimate(low, low, high, len(values))
    unit = (values.astype(np.float64) - low) / (high - low)
    bets = _bets(unit, level)
    least, most = _least_mean(unit, bets, population, level), 1 - _least_mean(1 - unit, bets, population, level)
    value = float(unit.mean()) if len(unit) else math.nan
    ends = min(least, value), max(most, value)  # in one of twenty measurements all means may be refuted
    value, least, most = (low + (high - low) * each for each in (value, *ends))
    return Estimate(value, least, most, len(unit))


def _bets(unit: Column, level: float) -> Column:
    """Return for each value what is bet on it, a function of those before it (Eq. 26 of that paper)."""
    counts = np.arange(1, len(unit) + 1)
    means = (0.5 + np.cumsum(unit)) / (counts + 1)
    variances = (0.25 + np.cumsum((unit - means) ** 2)) / (counts + 1)
    before = np.concatenate([[0.25], variances])[: len(unit)]
    bets: Column = np.sqrt(2 * math.log(2 / (1 - level)) / (before * counts * np.log1p(counts)))
    return bets


def _least_mean(unit: Column, bets: Column, population: int, level: float) -> float:
    """Return the smallest mean at which the capital that bets on more stays small: it falls as the mean grows."""
    before = np.concatenate([[0.0], np.cumsum(unit)])
    left = population - np.arange(len(unit))

    def is_refuted(mean: float) -> bool:
        expected = ((population * mean - before[:-1]) / left).clip(0, 1)
        bet = np.minimum(bets, 0.5 / np.maximum(expected, 1e-12))  # at most half of the capital
        return bool(np.log1p(bet * (unit - expected)).cumsum().max(initial=0.0) >= math.log(2 / (1 - level)))

    least, most = before[-1] / population, (before[-1] + population - len(unit)) / population
    if not is_refuted(least):
        return float(least)
    while least < (middle := (least + most) / 2) < most:
        least, most = (middle, most) if is_refuted(middle) else (least, middle)
    return float(least)


def estimate_stopped(values: Column, population: int | None, bounds: tuple[float, float] | None = None) -> Estimate:
    """Mean of a column, in the order of positions, of a measurement that stopped after the first of `population`.

    A bool column, and one that lies within bounds, such as a share of probes, get a confidence sequence, others the
    ordinary interval; so does all if population is None.
    """
    if values.dtype == bool:
        if population is None:
            return estimate(values)
        return confidence_sequence(int(values.sum()), len(values), population)
    if bounds is None:
        return estimate(values)
    if population is None:
        return bounded_mean(values, *bounds)
    order = shuffled(population)[: len(values)]
    in_order = values[np.argsort(np.argsort(order))]
    return mean_sequence(in_order[np.isfinite(in_order)], population, *bounds)


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

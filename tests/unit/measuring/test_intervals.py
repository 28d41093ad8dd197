"""Intervals against references."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bastion.measuring.intervals import (
    Estimate,
    bounded_mean,
    clopper_pearson,
    difference,
    estimate,
    mean,
    student_t,
    wilson,
)


@given(st.integers(0, 500), st.integers(1, 500))
def test_wilson_matches_scipy(successes: int, n: int) -> None:
    successes = min(successes, n)
    ours = wilson(successes, n)
    theirs = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-9)
    assert ours.low <= ours.value <= ours.high
    assert (ours.value, ours.n) == (successes / n, n)


def test_wilson_never_claims_certainty() -> None:
    assert wilson(0, 100).high == pytest.approx(0.0370, abs=1e-4)
    assert wilson(100, 100).low == pytest.approx(0.9630, abs=1e-4)


def test_clopper_pearson_matches_the_published_example() -> None:
    """13 of 16: Fagerland, Lydersen and Laake, Statistical Analysis of Contingency Tables, chapter 2."""
    assert clopper_pearson(13, 16)[:3] == pytest.approx((0.8125, 0.5435, 0.9595), abs=5e-5)


@given(st.integers(0, 500), st.integers(1, 500), st.sampled_from([0.9, 0.95, 0.99]))
def test_clopper_pearson_matches_scipy(successes: int, n: int, level: float) -> None:
    successes = min(successes, n)
    ours = clopper_pearson(successes, n, level)
    theirs = stats.binomtest(successes, n).proportion_ci(level, method="exact")
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


def test_clopper_pearson_stays_exact_for_many_examples() -> None:
    theirs = stats.binomtest(20_000, 50_000).proportion_ci(0.95, method="exact")
    assert clopper_pearson(20_000, 50_000)[1:3] == pytest.approx((theirs.low, theirs.high), abs=1e-9)


@pytest.mark.parametrize(("interval", "never_less"), [(clopper_pearson, True), (wilson, False)])
def test_only_the_exact_interval_never_covers_less_than_it_says(
    interval: Callable[[int, int], Estimate], never_less: bool
) -> None:
    n = 30
    intervals = [interval(successes, n) for successes in range(n + 1)]
    for_each_p = [
        sum(stats.binom.pmf(k, n, p) for k, e in enumerate(intervals) if e.low <= p <= e.high)
        for p in np.linspace(0.005, 0.995, 199)
    ]
    assert bool(min(for_each_p) >= 0.95) is never_less


def test_no_examples_say_nothing() -> None:
    for nothing in (wilson(0, 0), clopper_pearson(0, 0)):
        assert math.isnan(nothing.value)
        assert (nothing.low, nothing.high) == (0.0, 1.0)
    assert math.isnan(mean(np.array([math.nan])).value)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = [e.low <= 0.3 <= e.high for e in (estimate(rng.random(80) < 0.3) for _ in range(2000))]
    assert 0.935 < np.mean(hits) < 0.97
    values = [estimate(rng.normal(2.0, 3.0, 80)) for _ in range(2000)]
    assert 0.93 < np.mean([e.low <= 2.0 <= e.high for e in values]) < 0.965


@pytest.mark.parametrize("n", [8, 50, 500])
def test_the_interval_of_shares_covers_where_the_normal_one_collapses(n: int) -> None:
    """Shares of 15 right answers of which those to one example resemble each other: beta-binomial, mean 0.97."""
    generator = np.random.default_rng(0)
    columns = generator.binomial(15, generator.beta(0.97, 0.03, (2000, n))) / 15
    bounded, normal = (
        np.mean([found.low <= 0.97 <= found.high for found in map(interval, columns)])
        for interval in (bounded_mean, mean)
    )
    assert bounded > 0.94
    assert normal < bounded


@given(st.lists(st.floats(-0.5, 2.0), min_size=1, max_size=20))
def test_the_interval_of_shares_stays_between_their_bounds_and_has_a_width(values: list[float]) -> None:
    found = bounded_mean(np.array(values), -0.5, 2.0)
    assert -0.5 <= found.low <= found.value + 1e-12
    assert found.value - 1e-12 <= found.high <= 2.0
    assert found.low < found.high


@pytest.mark.parametrize("n", [*range(2, 40), 1_000, 50_000])
def test_the_interval_of_a_mean_is_students(n: int) -> None:
    assert student_t(n - 1) == pytest.approx(stats.t.ppf(0.975, n - 1), rel=5e-6)
    values = np.random.default_rng(n).normal(2.0, 3.0, n)
    found, theirs = mean(values), stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), rel=1e-4)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_interval_of_few_values_covers_the_truth(n: int) -> None:
    found = [mean(values) for values in np.random.default_rng(0).normal(2.0, 3.0, (4000, n))]
    assert 0.94 < np.mean([each.low <= 2.0 <= each.high for each in found]) < 0.96


def test_values_that_are_not_there_are_left_out() -> None:
    assert mean(np.array([1.0, math.nan, 3.0])).n == 2
    assert mean(np.array([1.0, math.nan, 3.0])).value == 2.0


def test_the_difference_of_two_samples_is_newcombes() -> None:
    """His example (a) of 1998: 56/70 and 48/80 differ by 0.2000, 0.0524 to 0.3339 by method 10."""
    found = difference(wilson(48, 80), wilson(56, 70))
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)

"""Rank correlation against scipy's, and intervals that cover."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from bastion.measuring.correlation import spearman


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ties", [False, True])
def test_it_is_scipys(seed: int, ties: bool) -> None:
    draw = np.random.default_rng(seed)
    a, b = draw.normal(size=(2, 20))
    if ties:
        a, b = a.round(), b.round()
    assert spearman(a, b).value == pytest.approx(scipy.stats.spearmanr(a, b).statistic)


def test_the_interval_is_bonett_and_wrights() -> None:
    a = np.arange(20.0)
    b = np.array([3, 1, 0, 2, 6, 4, 5, 9, 8, 7, 11, 10, 14, 12, 13, 19, 15, 16, 18, 17.0])
    found = spearman(a, b)
    half = 1.959963984540054 * math.sqrt((1 + found.value**2 / 2) / 17)
    assert math.atanh(found.high) - math.atanh(found.low) == pytest.approx(2 * half)
    assert found.low < found.value < found.high


def test_it_covers_the_true_correlation() -> None:
    """Of normal pairs of correlation 0.6 the true rank correlation is (6/π)·arcsin 0.3."""
    truth, draw = 6 / math.pi * math.asin(0.3), np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        a, noise = draw.normal(size=(2, 20))
        found = spearman(a, 0.6 * a + 0.8 * noise)
        covered += found.low <= truth <= found.high
    assert 0.92 <= covered / 400 <= 0.98


def test_a_perfect_order_of_few_models_proves_little() -> None:
    four, twenty = (spearman(np.arange(n), np.arange(n) ** 3) for n in (4, 20))
    assert four.value == twenty.value == four.high == twenty.high == 1
    assert four.low < 0 < 0.95 < twenty.low < 1
    reverse = spearman(np.arange(20), -np.arange(20))
    assert (reverse.value, reverse.low, reverse.high) == (-1, -1, pytest.approx(-twenty.low))


def test_what_says_nothing_has_no_interval() -> None:
    assert math.isnan(spearman(np.ones(9), np.arange(9)).value)
    assert (spearman(np.arange(3), np.arange(3)).low, spearman(np.arange(3), np.arange(3)).high) == (-1, 1)
    assert math.isnan(spearman(np.zeros(0), np.zeros(0)).value)


def test_pairs_with_a_nan_are_left_out_and_infinity_ranks_last() -> None:
    a, b = np.arange(10.0), np.arange(10.0)[::-1].copy()
    a[[2, 7]] = math.nan
    assert (spearman(a, b).value, spearman(a, b).n) == (-1, 8)
    b[0] = math.inf
    assert spearman(a, b).value == -1

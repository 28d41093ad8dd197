"""Two models on the same examples, against published examples and by enumeration."""

from __future__ import annotations

from fractions import Fraction
from math import comb, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bastion.measuring.intervals import Estimate, mean
from bastion.measuring.paired import difference_sequence, mcnemar, paired_difference, tango


def test_mcnemar_matches_the_published_example() -> None:
    """Cavo et al. 2012, 6 and 16 changes, in Fagerland, Lydersen and Laake (chapter 8; R: contingencytables)."""
    assert mcnemar(6, 16) == pytest.approx(0.052479, abs=5e-7)


@given(st.integers(0, 300), st.integers(0, 300))
def test_mcnemar_is_the_binomial_test_of_a_half(only_a: int, only_b: int) -> None:
    changed = only_a + only_b
    tail = sum(comb(changed, k) for k in range(max(only_a, only_b), changed + 1))
    exact = min(1, 2 * Fraction(tail, 2**changed))
    assert mcnemar(only_a, only_b) == pytest.approx(float(exact), rel=1e-9)
    assert mcnemar(only_a, only_b) == mcnemar(only_b, only_a)


def test_no_change_is_no_evidence() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(0, 5) == pytest.approx(2 / 2**5)
    assert mcnemar(0, 6) == pytest.approx(2 / 2**6)  # below 0.05: the fewest changes that can tell two models apart


def test_tango_matches_the_published_example() -> None:
    """Cavo et al. 2012 (59, 6, 16, 80), in Fagerland, Lydersen and Laake (chapter 8; R: contingencytables)."""
    assert tango(6, 16, 161)[:3] == pytest.approx((-0.0621, -0.1240, -0.0054), abs=5e-5)


def test_without_a_change_the_difference_is_still_uncertain() -> None:
    z2 = stats.norm.ppf(0.975) ** 2
    assert tango(0, 0, 100)[:3] == pytest.approx((0, -z2 / (100 + z2), z2 / (100 + z2)))
    assert tango(50, 0, 50).high == 1
    assert tango(0, 0, 0)[1:] == (-1.0, 1.0, 0)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 200))
def test_tango_mirrors_if_the_models_are_swapped(gained: int, lost: int, same: int) -> None:
    n = gained + lost + same
    one, other = tango(gained, lost, n), tango(lost, gained, n)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low), abs=1e-9)
    assert -1 <= one.low <= one.value <= one.high <= 1


def wald(gained: int, lost: int, n: int) -> Estimate:
    value = (gained - lost) / n
    half = 1.96 * sqrt((gained + lost) / n - value**2) / sqrt(n)
    return Estimate(value, value - half, value + half, n)


@pytest.mark.parametrize(("gain", "loss"), [(0.04, 0.0), (0.05, 0.01), (0.1, 0.1), (0.2, 0.05)])
def test_tango_covers_for_few_changes_where_the_normal_interval_does_not(gain: float, loss: float) -> None:
    """By enumeration of what 60 examples can give."""
    n, covered = 60, {"tango": 0.0, "wald": 0.0}
    for gained in range(n + 1):
        for lost in range(n + 1 - gained):
            weight = stats.multinomial.pmf([gained, lost, n - gained - lost], n, [gain, loss, 1 - gain - loss])
            if weight < 1e-7:
                continue
            for name, interval in {"tango": tango, "wald": wald}.items():
                e = interval(gained, lost, n)
                covered[name] += weight * (e.low <= gain - loss <= e.high)
    assert covered["tango"] > 0.935
    assert covered["wald"] < covered["tango"]


def test_a_difference_of_accuracies_counts_the_changes() -> None:
    a = np.array([True] * 70 + [False] * 30)
    b = np.roll(a, 5)
    assert paired_difference(a, b) == tango(5, 5, 100)
    assert paired_difference(a, a | b) == tango(5, 0, 100)


def test_a_difference_is_inside_its_sequence_at_every_look_but_in_one_of_twenty_measurements() -> None:
    """Tango's interval is not: it is made for one look."""
    draw, n = np.random.default_rng(1), 256
    change = np.repeat([1, -1, 0], [48, 32, n - 80])  # only the second model is right, only the first
    held = {"sequence": 0, "tango": 0}
    for _ in range(200):
        order = draw.permutation(change)
        looks = [(int((order[:k] > 0).sum()), int((order[:k] < 0).sum()), k) for k in range(16, n + 1, 16)]
        sequence = [difference_sequence(*look, population=n) for look in looks]
        assert sequence[-1][:3] == (1 / 16,) * 3  # all are known in the end
        held["sequence"] += all(each.low <= 1 / 16 <= each.high for each in sequence)
        held["tango"] += all(each.low <= 1 / 16 <= each.high for each in (tango(*look) for look in looks))
    assert held["sequence"] >= 190
    assert held["tango"] < 190


def test_a_difference_of_real_numbers_is_the_mean_of_the_differences() -> None:
    draw = np.random.default_rng(0)
    a = draw.random(50)
    b = a + draw.normal(0.1, 0.01, 50)
    assert paired_difference(a, b) == mean(b - a)
    assert paired_difference(a, b).low > 0.09  # what both share cancels out

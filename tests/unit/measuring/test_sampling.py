"""Some examples of a split, drawn without replacement. Coverage is computed exactly where it can be."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from bastion.errors import BastionError
from bastion.measuring.intervals import Estimate, bounded_mean, clopper_pearson, wilson
from bastion.measuring.sampling import confidence_sequence, mean_sequence, sample_size, share_lost, two_phase

N = 60
Interval = Callable[[int, int], Estimate]
Rule = Callable[[Estimate], bool]


def sequence(successes: int, n: int) -> Estimate:
    return confidence_sequence(successes, n, N)


def at_once(right: int, interval: Interval) -> float:
    """Probability that the interval has the true accuracy in it after every single one of the examples."""
    return _coverage(right, interval, lambda _: False, always=True)


def when_stopped(right: int, interval: Interval, rule: Rule) -> float:
    """Probability that the truth is in the interval at which the rule stops, or in the last one."""
    return _coverage(right, interval, rule, always=False)


def _coverage(right: int, interval: Interval, rule: Rule, *, always: bool) -> float:
    """Over all orders of N examples, `right` of which are right: the number of right ones is a Markov chain."""
    going, covered = {0: 1.0}, 0.0
    for n in range(1, N + 1):
        after: dict[int, float] = {}
        for successes, probability in going.items():
            up = (right - successes) / (N - n + 1)
            after[successes + 1] = after.get(successes + 1, 0) + probability * up
            after[successes] = after.get(successes, 0) + probability * (1 - up)
        going = {}
        for successes, probability in after.items():
            if probability == 0:
                continue
            e = interval(successes, n)
            inside = e.low <= right / N <= e.high
            if n == N or (not always and rule(e)):
                covered += probability * inside
            elif inside or not always:
                going[successes] = probability
    return covered


@pytest.fixture(scope="module")
def tables() -> dict[str, Interval]:
    intervals: dict[str, Interval] = {"sequence": sequence, "wilson": wilson}
    pairs = [(successes, n) for n in range(1, N + 1) for successes in range(n + 1)]

    def table(interval: Interval) -> Interval:
        known = {pair: interval(*pair) for pair in pairs}
        return lambda successes, n: known[successes, n]

    return {name: table(interval) for name, interval in intervals.items()}


def test_the_sequence_covers_at_every_n_at_once_and_wilson_does_not(tables: dict[str, Interval]) -> None:
    assert min(at_once(right, tables["sequence"]) for right in range(N + 1)) >= 0.95
    assert min(at_once(right, tables["wilson"]) for right in range(N + 1)) < 0.75


STOPPING_RULES: dict[str, Rule] = {
    "narrow enough": lambda e: e.high - e.low < 0.4,
    "not a half": lambda e: e.high < 0.5 or e.low > 0.5,
}


@pytest.mark.parametrize("rule", STOPPING_RULES.values(), ids=STOPPING_RULES)
def test_the_sequence_covers_when_stopped_and_wilson_covers_less(tables: dict[str, Interval], rule: Rule) -> None:
    assert min(when_stopped(right, tables["sequence"], rule) for right in range(N + 1)) >= 0.95
    assert min(when_stopped(right, tables["wilson"], rule) for right in range(N + 1)) < 0.94


@pytest.mark.parametrize("population", [2 * N, 10 * N + 7])
def test_the_sequence_of_a_larger_population_covers_the_accuracy_on_a_part_of_it(population: int) -> None:
    """Such as one class of a split, of which it is not known how many examples there are."""
    found = {
        (successes, n): confidence_sequence(successes, n, population)
        for n in range(1, N + 1)
        for successes in range(n + 1)
    }
    assert min(at_once(right, lambda *counts: found[counts]) for right in range(N + 1)) >= 0.95


def test_the_sequence_covers_in_simulated_measurements_of_a_whole_split() -> None:
    """10,000 examples, looked at after every 500."""
    population, looks, truth = 10_000, np.arange(500, 10_001, 500), 0.535
    draw = np.random.default_rng(0)
    split = np.arange(population) < round(truth * population)
    missed = {"sequence": 0, "wilson": 0}
    for _ in range(400):
        counts = np.cumsum(draw.permutation(split))[looks - 1]
        sequences = [confidence_sequence(int(k), int(n), population) for k, n in zip(counts, looks, strict=True)]
        wilsons = [wilson(int(k), int(n)) for k, n in zip(counts, looks, strict=True)]
        missed["sequence"] += any(not e.low <= truth <= e.high for e in sequences)
        missed["wilson"] += any(not e.low <= truth <= e.high for e in wilsons)
    assert missed["sequence"] / 400 <= 0.05
    assert missed["wilson"] / 400 > 0.08


@pytest.mark.parametrize("population", [1, 2, 7, 12])
def test_the_sequence_is_prior_over_posterior_below_twenty(population: int) -> None:
    """By Bayes' rule, in fractions."""
    prior = Fraction(1, population + 1)
    for n in range(population + 1):
        for successes in range(n + 1):
            likelihood = [
                Fraction(math.comb(m, successes) * math.comb(population - m, n - successes), math.comb(population, n))
                for m in range(population + 1)
            ]
            posterior = [each * prior / sum(each * prior for each in likelihood) for each in likelihood]
            inside = [m for m, each in enumerate(posterior) if each > 0 and prior / each < 20]
            e = confidence_sequence(successes, n, population)
            assert (e.low, e.high) == (inside[0] / population, inside[-1] / population)


def test_the_sequence_begins_with_anything_and_ends_with_the_truth() -> None:
    assert confidence_sequence(0, 0, 50_000)[1:] == (0.0, 1.0, 0)
    assert confidence_sequence(26_777, 50_000, 50_000) == (0.53554, 0.53554, 0.53554, 50_000)


def test_the_sequence_is_wider_than_an_interval_at_an_n_fixed_beforehand() -> None:
    sequence, fixed = confidence_sequence(535, 1000, 10_000), clopper_pearson(535, 1000)
    assert sequence.low < fixed.low < 0.535 < fixed.high < sequence.high
    assert 1.5 < (sequence.high - sequence.low) / (fixed.high - fixed.low) < 2.5


SPLITS: dict[str, tuple[np.ndarray, tuple[float, float]]] = {
    "accuracies over 15 corruptions": (np.random.default_rng(1).binomial(15, 0.6, 1000) / 15, (0, 1)),
    "mostly right": (np.where(np.arange(1000) < 950, 1.0, np.random.default_rng(2).random(1000)), (0, 1)),
    "weighted errors": (np.random.default_rng(3).beta(0.3, 0.6, 1000) * 1.7, (0, 1.7)),
    "differences": (np.random.default_rng(4).integers(-2, 3, 1000) / 2, (-1, 1)),
}


def test_the_sequence_of_a_mean_covers_at_every_look_and_ordinary_intervals_do_not() -> None:
    draws, looks, ordinary = 60, range(20, 1001, 35), 0
    for split, bounds in SPLITS.values():
        draw, truth, missed = np.random.default_rng(0), split.mean(), 0
        for _ in range(draws):
            values = draw.permutation(split)
            found = [mean_sequence(values[:n], 1000, *bounds) for n in looks]
            assert all(e.low <= e.value <= e.high for e in found)
            missed += any(not e.low - 1e-9 <= truth <= e.high + 1e-9 for e in found)
            fixed = [bounded_mean(values[:n], *bounds) for n in looks]
            ordinary += any(not e.low <= truth <= e.high for e in fixed)
        assert missed <= 0.05 * draws
    assert ordinary > 0.08 * draws * len(SPLITS)


def test_the_sequence_of_a_mean_keeps_the_means_against_which_no_bet_has_won() -> None:
    """The capital of each mean on a grid, value by value."""
    values, population = np.random.default_rng(5).random(30), 50

    def refuted(mean: float, values: np.ndarray) -> bool:
        capital, spread, variance, total = 1.0, 0.25, 0.25, 0.0
        for i, value in enumerate(values, 1):
            expected = min(max((population * mean - total) / (population - i + 1), 0.0), 1.0)
            bet = math.sqrt(2 * math.log(2 / 0.05) / (variance * i * math.log(1 + i)))
            capital *= 1 + min(bet, 0.5 / max(expected, 1e-12)) * (value - expected)
            if capital >= 2 / 0.05:
                return True
            total += value
            centre = (0.5 + total) / (i + 1)
            spread += (value - centre) ** 2
            variance = spread / (i + 1)
        return False

    e = mean_sequence(values, population)
    grid = np.linspace(values.sum() / population, (values.sum() + 20) / population, 2001)
    inside = [mean for mean in grid if not refuted(mean, values) and not refuted(1 - mean, 1 - values)]
    assert inside[0] == pytest.approx(e.low, abs=3e-4)
    assert inside[-1] == pytest.approx(e.high, abs=3e-4)


def test_the_sequence_of_a_mean_begins_with_its_bounds_and_ends_with_the_truth() -> None:
    assert mean_sequence(np.zeros(0), 100, -1, 2)[1:] == (-1.0, 2.0, 0)
    values = np.random.default_rng(0).random(1000)
    assert mean_sequence(values, 1000)[:3] == pytest.approx((values.mean(),) * 3)
    assert mean_sequence(np.zeros(5), 10, 0, 0) == (0, 0, 0, 5)  # of probes that all have the weight 0
    constant = mean_sequence(np.ones(500), 1000)
    assert constant.low > 0.95 and constant.high == 1


def test_the_share_that_is_lost_is_covered_in_every_small_population() -> None:
    """All populations of 20, all samples of 8, by their exact probabilities."""
    intervals = [share_lost(k, 8, 20) for k in range(9)]
    for lost in range(21):
        probability = stats.hypergeom(20, lost, 8).pmf
        assert sum(probability(k) for k, e in enumerate(intervals) if e.low <= lost / 20 <= e.high) >= 0.95


@pytest.mark.parametrize(("lost", "n", "population"), [(3, 200, 5000), (0, 50, 400), (170, 200, 210), (9, 9, 40)])
def test_the_share_that_is_lost_is_certain_below_and_what_scipys_tail_does_not_reject_above(
    lost: int, n: int, population: int
) -> None:
    numbers = np.arange(lost, population - (n - lost) + 1)
    inside = numbers[stats.hypergeom.cdf(lost, population, numbers, n) > 0.05]
    e = share_lost(lost, n, population)
    assert (e.low, e.high) == (lost / population, inside[-1] / population)


def test_a_large_sample_of_a_finite_population_says_more() -> None:
    assert share_lost(7, 900, 1000).high < 0.7 * clopper_pearson(7, 900).high
    assert share_lost(7, 1000, 1000)[:3] == (0.007, 0.007, 0.007)


def test_an_estimate_is_inside_its_interval_even_where_the_population_has_no_such_share() -> None:
    e = share_lost(1, 999, 1000)  # 1/999 is not a number of thousandths
    assert (e.value, e.low, e.high) == (0.001, 0.001, 0.001)


@pytest.mark.parametrize("interval", [confidence_sequence, share_lost])
def test_impossible_counts_are_refused(interval: Callable[[int, int, int], Estimate]) -> None:
    with pytest.raises(BastionError, match="expected 0 <= successes <= n <= population, got 5 of 4 of 10"):
        interval(5, 4, 10)


def columns(n: int, survivors: int, sampled: int, lost: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    row = np.arange(n)
    return row < survivors, row < sampled, row < lost


def test_two_phases_on_everybody_are_one_measurement() -> None:
    both = two_phase(*columns(n=200, survivors=100, sampled=100, lost=6))
    assert (both.value, both.low, both.high) == pytest.approx((0.47, 0.47, 0.47))
    assert both.population == pytest.approx(wilson(94, 200))


def test_two_phases_multiply_shares() -> None:
    both = two_phase(*columns(n=1000, survivors=500, sampled=100, lost=2))
    share = share_lost(2, 100, 500)
    assert both[:3] == pytest.approx((0.5 * 0.98, 0.5 * (1 - share.high), 0.5 * (1 - share.low)))
    assert both.population.low < both.low < both.value < both.high < both.population.high


def test_without_survivors_nothing_is_left_to_sample() -> None:
    none = two_phase(*columns(n=100, survivors=0, sampled=0, lost=0))
    assert none[:4] == (0, 0, 0, 100)
    assert none.population == pytest.approx(wilson(0, 100))


def test_without_a_sample_only_the_bound_of_phase_one_is_known() -> None:
    unknown = two_phase(*columns(n=100, survivors=40, sampled=0, lost=0))
    assert math.isnan(unknown.value)
    assert unknown[1:3] == (0, 0.4)


def test_phases_that_contradict_each_other_are_refused() -> None:
    survived, sampled, lost = columns(n=10, survivors=4, sampled=6, lost=2)
    with pytest.raises(BastionError, match="only survivors can be sampled"):
        two_phase(survived, sampled, lost)
    with pytest.raises(BastionError, match="only sampled examples can be lost"):
        two_phase(sampled, lost, survived)


@pytest.mark.parametrize(("planted", "sample"), [(2, 60), (12, 60), (12, 200), (60, 100)])
def test_two_phases_cover_the_full_attack_over_draws_of_the_sample(planted: int, sample: int) -> None:
    """600 examples, 300 of which survive phase one, `planted` of which would fall in phase two."""
    draw = np.random.default_rng(planted + sample)
    survived, weak = np.arange(600) < 300, np.arange(600) < planted
    truth, hits, values = (300 - planted) / 600, 0, []
    for _ in range(500):
        sampled = np.zeros(600, bool)
        sampled[draw.choice(300, sample, replace=False)] = True
        both = two_phase(survived, sampled, sampled & weak)
        hits += both.low <= truth <= both.high
        values.append(both.value)
    assert hits / 500 >= 0.94  # exactly at least 0.95, but for 500 draws
    assert np.mean(values) == pytest.approx(truth, abs=3 * np.std(values) / math.sqrt(500))


def test_two_phases_cover_the_population_over_draws_of_examples_and_sample() -> None:
    """Half of all images survive phase one, a tenth of these would fall in phase two; Wilson on phase one is wrong."""
    draw, truth, hits, naive = np.random.default_rng(1), 0.45, 0, 0
    for _ in range(500):
        survived = draw.random(400) < 0.5
        weak = survived & (draw.random(400) < 0.1)
        sampled = np.zeros(400, bool)
        sampled[draw.choice(np.flatnonzero(survived), 80, replace=False)] = True
        e = two_phase(survived, sampled, sampled & weak).population
        hits += e.low <= truth <= e.high
        first = wilson(int(survived.sum()), 400)
        naive += first.low <= truth <= first.high
    assert hits / 500 >= 0.95
    assert naive / 500 < 0.8


@pytest.mark.parametrize("lost", [0, 1])
def test_the_sample_size_is_the_smallest_that_is_narrow_enough(lost: int) -> None:
    share = lost / 100
    size = sample_size(5000, 10_000, width=0.01, lost_share=share)

    def width(sampled: int) -> float:
        both = two_phase(*columns(10_000, 5000, sampled, math.ceil(share * sampled)))
        return both.high - both.low

    assert width(size) <= 0.01 < width(size - 100 if lost else size - 1)


def test_small_widths_need_nearly_everybody() -> None:
    assert sample_size(50, 100, width=0.001) >= 48
    assert sample_size(5000, 10_000) < 400

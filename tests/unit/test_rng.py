"""Random numbers are pure functions of their key, and look random along every axis of it."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bastion import rng

N = torch.arange(2000)
KNOWN_BITS = [-6785887917777648297, 282169555972072165, -4139510194592898815, 3599598362865946869]


def test_a_number_depends_on_its_key_alone() -> None:
    whole = rng.uniform(3, torch.arange(10), "start", (2, 4))
    assert torch.equal(rng.uniform(3, torch.tensor([7, 2]), "start", (2, 4)), whole[[7, 2]])


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**40))
@settings(max_examples=50)
def test_any_index_and_draw_can_be_asked_alone(seed: int, index: int, draw: int) -> None:
    pair = rng.bits(seed, torch.tensor([index, index + 1]), draw, (3,))
    assert torch.equal(rng.bits(seed, torch.tensor([index + 1]), draw, (3,))[0], pair[1])


def test_draws_may_differ_from_example_to_example() -> None:
    mixed = rng.normal(0, torch.tensor([5, 5]), torch.tensor([1, 2]), (4,))
    assert torch.equal(mixed[0], rng.normal(0, torch.tensor([5]), 1, (4,))[0])
    assert torch.equal(mixed[1], rng.normal(0, torch.tensor([5]), 2, (4,))[0])


def test_known_values_never_change() -> None:
    """Stored facts depend on these numbers; a change of the generator must be a decision."""
    assert rng.key("pgd", 0) == -7225100273852199187
    assert rng.bits(0, torch.tensor([0, 1]), "start", (2,)).flatten().tolist() == KNOWN_BITS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_passes_kolmogorov_smirnov(dtype: torch.dtype) -> None:
    values = rng.uniform(1, N, "ks", (50,), dtype=dtype)
    assert values.dtype == dtype
    assert values.min() >= 0 and values.max() < 1
    assert stats.kstest(values.flatten().numpy(), "uniform").pvalue > 1e-3


def test_normal_passes_kolmogorov_smirnov_and_has_its_moments() -> None:
    values = rng.normal(1, N, "ks", (50,), dtype=torch.float64).flatten().numpy()
    assert stats.kstest(values, "norm").pvalue > 1e-3
    n = len(values)
    assert abs(values.mean()) < 4 / n**0.5
    assert abs(values.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs(stats.skew(values)) < 4 * (6 / n) ** 0.5
    assert abs(stats.kurtosis(values)) < 4 * (24 / n) ** 0.5


def test_uniform_has_its_moments() -> None:
    values = rng.uniform(5, N, 0, (50,), dtype=torch.float64)
    assert abs(values.mean() - 0.5) < 4 * (1 / 12 / values.numel()) ** 0.5
    assert abs(values.var() - 1 / 12) < 4 * (1 / 180 / values.numel()) ** 0.5


ONE = torch.zeros(1, dtype=torch.int64)
STREAMS = {  # neighbours along every axis of the key
    "seeds": lambda: torch.cat([rng.uniform(seed, ONE, "a") for seed in range(1000)]),
    "indices": lambda: rng.uniform(0, N, "a"),
    "draws": lambda: rng.uniform(0, torch.zeros_like(N), N),
    "names": lambda: torch.cat([rng.uniform(0, ONE, f"draw {i}") for i in range(1000)]),
    "elements": lambda: rng.uniform(0, ONE, "a", (2000,))[0],
}


@pytest.mark.parametrize("axis", STREAMS)
def test_neighbours_along_each_axis_are_uniform_and_uncorrelated(axis: str) -> None:
    stream = STREAMS[axis]().double().numpy()
    assert stats.kstest(stream, "uniform").pvalue > 1e-3
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(stream[:-lag], stream[lag:])[0, 1]) < 4 / len(stream) ** 0.5


def test_pairs_of_examples_and_of_draws_are_independent() -> None:
    """Chi-square on a 10 × 10 grid of pairs."""
    base = rng.uniform(0, N, 1, (20,))
    for other in (rng.uniform(0, N + 1, 1, (20,)), rng.uniform(0, N, 2, (20,)), rng.uniform(1, N, 1, (20,))):
        cells = (base * 10).floor() * 10 + (other * 10).floor()
        counts = torch.bincount(cells.flatten().long(), minlength=100)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_every_bit_is_fair() -> None:
    words = rng.bits(0, N, "bits", (50,)).flatten()
    for bit in range(64):
        ones = int(((words >> bit) & 1).sum())
        assert abs(ones - len(words) / 2) < 4.5 * (len(words) / 4) ** 0.5


def test_integers_cover_their_range_evenly() -> None:
    values = rng.integers(0, N, "die", (30,), low=1, high=7)
    assert stats.chisquare(torch.bincount(values.flatten())[1:].numpy()).pvalue > 1e-3
    assert values.min() == 1
    assert values.max() == 6


def test_integers_refuse_an_empty_range() -> None:
    with pytest.raises(ValueError, match="need 1 to 2\\^31 values, got 0"):
        rng.integers(0, N, 0, high=0)


def test_signs_are_fair() -> None:
    signs = rng.signs(0, N, "sign", (50,))
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(signs.mean()) < 4 / signs.numel() ** 0.5


def test_permutations_are_permutations_and_all_orders_are_as_likely() -> None:
    orders = [tuple(rng.permutation(seed, "order", 4).tolist()) for seed in range(2400)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    counts = np.unique([str(order) for order in orders], return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-3


def test_key_tells_apart_what_joins_to_the_same_text() -> None:
    assert rng.key("a", "b") != rng.key("ab")
    assert rng.key(1) != rng.key("1")


def _global_draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_reseed_fixes_the_global_generators_and_preserved_gives_them_back() -> None:
    before = _global_draws()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = _global_draws()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    with rng.preserved():
        rng.reseed("augment", 0, 1, 2)
        first = _global_draws()
        rng.reseed("augment", 0, 1, 2)
        assert _global_draws() == first
        rng.reseed("augment", 0, 1, 3)
        assert _global_draws() != first
    assert _global_draws() == expected
    assert before != first


@pytest.mark.parametrize("draw", [random.random, lambda: np.random.rand(), lambda: torch.rand(1)])
def test_the_state_changes_with_every_draw_and_with_nothing_else(draw: Callable[[], object]) -> None:
    with rng.preserved():
        before = rng.state()
        assert rng.state() == before
        draw()
        assert rng.state() != before

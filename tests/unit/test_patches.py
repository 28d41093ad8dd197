"""Patches are counted as RSPC counts them."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bastion.patches import Grid


@pytest.mark.parametrize(
    ("side", "size", "share", "count"),
    [(224, 16, 0.1, 20), (32, 4, 0.1, 7), (32, 4, 0.5, 32), (32, 4, 0.0, 1), (32, 4, 1.0, 64), (60, 10, 0.25, 9)],
)
def test_a_share_of_the_patches_is_rounded_up(side: int, size: int, share: float, count: int) -> None:
    assert Grid(side, side, size).share(share) == count


@given(st.integers(1, 100), st.integers(1, 40), st.integers(1, 40))
def test_floating_point_adds_no_patch(percent: int, rows: int, columns: int) -> None:
    grid = Grid(rows, columns, 1)
    assert grid.share(percent / 100) == max(1, math.ceil(Fraction(percent, 100) * rows * columns))


def test_random_patches_are_different_and_depend_on_seed_and_index_alone() -> None:
    grid, index = Grid(32, 32, 4), torch.tensor([3, 9, 3])
    chosen = grid.random(index, 7, seed=1, draw=0)
    assert torch.equal(chosen[0], chosen[2]) and not torch.equal(chosen[0], chosen[1])
    assert torch.equal(chosen[1:2], grid.random(index[1:2], 7, seed=1, draw=0))
    assert not torch.equal(chosen, grid.random(index, 7, seed=2, draw=0))
    assert all(len(set(row)) == 7 for row in chosen.tolist())
    assert grid.mask(chosen).flatten(1).sum(1).tolist() == [7 * 16] * 3

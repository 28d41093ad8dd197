"""The order of examples."""

from __future__ import annotations

import numpy as np

from bastion.measuring.order import shuffled


def test_the_order_is_a_permutation_and_that_of_fewer_is_a_part_of_it() -> None:
    order = shuffled(10_000)
    assert np.array_equal(np.sort(order), np.arange(10_000))
    assert np.array_equal(order[order < 300], shuffled(300))
    halves = order[:5000]
    assert abs(halves.mean() - 4999.5) < 4 * 2887 / np.sqrt(10_000)  # of a random half: four standard errors
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.04

"""The fixed random order in which a measurement that may stop early takes the examples. No torch."""

from __future__ import annotations

import numpy as np

from bastion.measuring.store import Column


def shuffled(n: int) -> Column:
    """Return 0 to n - 1 in a fixed random order, by hash (SplitMix64); a smaller n keeps the relative order."""
    word = (np.arange(n, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(word ^ (word >> np.uint64(31)), kind="stable")


def measured_positions(n: int, population: int | None) -> Column:
    """Return the first n positions; with a population (stopped early), the first n of it in random order, sorted."""
    return np.arange(n) if population is None else np.sort(shuffled(population)[:n])

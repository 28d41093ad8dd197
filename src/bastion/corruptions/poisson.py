"""Poisson numbers from uniform ones by the alias method (Walker 1977, Vose 1991): one look-up and one comparison each.

torch.poisson draws from a generator, so that its numbers would depend on the rest of the batch.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LEVELS = 256


def poisson(levels: Tensor, scale: float, u: Tensor) -> Tensor:
    """Poisson(scale · levels / 255), for levels 0 to 255 as float32 and as many uniform numbers."""
    thresholds, aliases = (table.to(u.device) for table in _tables(scale))
    columns = len(thresholds) // _LEVELS
    scaled = u.flatten() * columns
    column = scaled.floor()  # of u's 24 bits, the first select the column, and the others are a uniform number in it
    places = (levels.flatten() * columns + column).int()
    own = scaled.sub_(column) < thresholds.index_select(0, places)
    return torch.where(own, column, aliases.index_select(0, places)).view(u.shape)


@lru_cache(maxsize=16)
def _tables(scale: float) -> tuple[Tensor, Tensor]:
    """For each level and equally likely column k: the probability of k itself, and the alias otherwise."""
    columns = 1 << int(np.ceil(np.log2(scale + 10 * scale**0.5 + 10)))
    threshold, alias = _alias_tables(_probabilities(scale, columns) * columns)
    return torch.from_numpy(threshold).float().flatten(), torch.from_numpy(alias).float().flatten()


def _alias_tables(shares: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Vose's method for all rows at once: each column below 1 is filled up from one above 1."""
    rows, columns = shares.shape
    threshold, alias = np.ones_like(shares), np.tile(np.arange(columns), (rows, 1))
    order = np.argsort(shares >= 1, axis=1, kind="stable")  # columns below 1 first
    next_large = (shares < 1).sum(1)
    last_small, next_small = next_large.copy(), np.ones(rows, dtype=np.int64)
    small, large = order[:, 0], order[np.arange(rows), next_large]
    next_large += 1
    row = np.arange(rows)  # rows that are not finished
    while len(row):
        at, source = small[row], large[row]
        threshold[row, at], alias[row, at] = shares[row, at], source
        shares[row, source] -= 1 - shares[row, at]
        emptied = shares[row, source] < 1
        spent, others = row[emptied], row[~emptied]
        small[spent] = large[spent]
        large[spent] = order[spent, np.minimum(next_large[spent], columns - 1)]
        small[others] = order[others, next_small[others] % columns]
        finished = np.where(emptied, next_large[row] >= columns, next_small[row] >= last_small[row])
        next_large[spent] += 1
        next_small[others] += 1
        row = row[~finished]
    return threshold, alias


def _probabilities(scale: float, columns: int) -> NDArray[np.float64]:
    """(256, columns): probabilities of the numbers 0, 1, … at each level."""
    k = np.arange(columns)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, columns)))])
    rate = scale * np.arange(1, _LEVELS)[:, None] / 255
    some = np.exp(k * np.log(rate) - rate - log_factorial)
    none = (k == 0).astype(np.float64)[None]
    table: NDArray[np.float64] = np.concatenate([none, some])
    table /= table.sum(1, keepdims=True)
    return table

"""Poisson numbers from uniform ones by the alias method (Walker 1977, Vose 1991): one look-up and one comparison each.

torch.poisson draws from a generator, whose numbers depend on what else is in the batch.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LEVELS = 256


def poisson(levels: Tensor, scale: float, u: Tensor) -> Tensor:
    """Poisson(scale · levels / 255), for levels 0 to 255 and as many uniform numbers, as float32."""
    thresholds, aliases = (table.to(u.device) for table in _tables(scale))
    columns = len(thresholds) // _LEVELS
    scaled = u * columns
    column = scaled.long()  # u has 24 bits: those that do not choose the column are the uniform number within it
    places = column + levels * columns
    return torch.where(scaled - column < thresholds[places], column, aliases[places]).float()


@lru_cache(maxsize=16)
def _tables(scale: float) -> tuple[Tensor, Tensor]:
    """For each level a row of equally likely columns k: the share of it that is k itself, and what the rest is."""
    most = scale + 10 * scale**0.5 + 10
    columns = 1 << int(np.ceil(np.log2(most)))
    shares = _probabilities(scale, columns) * columns  # of each number, in columns
    threshold, alias = np.ones_like(shares), np.tile(np.arange(columns), (_LEVELS, 1))
    rows = np.arange(_LEVELS)
    for _ in range(columns):  # in every row the smallest remaining share is filled up from the largest
        open_shares = np.where(np.isnan(shares), np.inf, shares)
        small = open_shares.argmin(1)
        large = np.where(np.isnan(shares), -np.inf, shares).argmax(1)
        threshold[rows, small] = np.minimum(shares[rows, small], 1.0)
        alias[rows, small] = large
        shares[rows, large] -= 1.0 - threshold[rows, small]
        shares[rows, small] = np.nan
    return torch.from_numpy(threshold).float().flatten(), torch.from_numpy(alias).flatten()


def _probabilities(scale: float, columns: int) -> NDArray[np.float64]:
    """(256, columns): of the numbers 0, 1, … at each level."""
    k = np.arange(columns)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, columns)))])
    rate = scale * np.arange(1, _LEVELS)[:, None] / 255
    some = np.exp(k * np.log(rate) - rate - log_factorial)
    none = (k == 0).astype(np.float64)[None]
    table: NDArray[np.float64] = np.concatenate([none, some])
    table /= table.sum(1, keepdims=True)
    return table

"""Plasma clouds by the diamond-square algorithm (Fournier et al. 1982) on a periodic grid."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_WOBBLE = 100.0


def plasma(noise: Tensor, decay: float) -> Tensor:
    """(B, N, N) in [0, 1] from as many uniform numbers in [-1, 1), one for each point; N is a power of two."""
    heights = noise * _amplitudes(noise.shape[-1], decay).to(noise)
    step = noise.shape[-1]
    while step >= 2:
        half = step // 2
        corners, centres = heights[:, ::step, ::step], heights[:, half::step, half::step]
        sums = corners + corners.roll(-1, 1)
        centres.add_(sums + sums.roll(-1, 2), alpha=0.25)
        heights[:, ::step, half::step].add_(corners + corners.roll(-1, 2) + centres + centres.roll(1, 1), alpha=0.25)
        heights[:, half::step, ::step].add_(sums + centres + centres.roll(1, 2), alpha=0.25)
        step = half
    low, high = heights.amin((1, 2), keepdim=True), heights.amax((1, 2), keepdim=True)
    return heights.sub_(low).div_(high - low)


@lru_cache(maxsize=16)
def _amplitudes(side: int, decay: float) -> Tensor:
    """(side, side): amplitude of the random displacement of each point.

    The published code multiplies `wobble` by a number up to `wobble`, so the amplitude falls by decay² at each level.
    """
    amplitudes, step, wobble = torch.zeros(side, side), side, _WOBBLE
    while step >= 2:
        half = step // 2
        for rows, columns in ((half, half), (0, half), (half, 0)):
            amplitudes[rows::step, columns::step] = wobble**2
        step, wobble = half, wobble / decay
    return amplitudes

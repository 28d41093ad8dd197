"""Plasma clouds by the diamond-square algorithm (Fournier et al. 1982) on a grid without borders."""

from __future__ import annotations

from torch import Tensor


def plasma(noise: Tensor, decay: float) -> Tensor:
    """(B, N, N) in [0, 1] from as many uniform numbers in [-1, 1), N a power of two; each one roughens its own point.

    The published code's noise has the amplitude `wobble`², so it falls by decay² from each level to the next.
    """
    heights = noise.new_zeros(noise.shape)
    step, wobble = noise.shape[-1], 100.0
    while step >= 2:
        half, amplitude = step // 2, wobble**2
        corners = heights[:, ::step, ::step]
        sums = corners + corners.roll(-1, 1)
        centres = (sums + sums.roll(-1, 2)) / 4 + amplitude * noise[:, half::step, half::step]
        heights[:, half::step, half::step] = centres
        beside = corners + corners.roll(-1, 2) + centres + centres.roll(1, 1)
        heights[:, ::step, half::step] = beside / 4 + amplitude * noise[:, ::step, half::step]
        below = corners + corners.roll(-1, 1) + centres + centres.roll(1, 2)
        heights[:, half::step, ::step] = below / 4 + amplitude * noise[:, half::step, ::step]
        step, wobble = half, wobble / decay
    low, high = heights.amin((1, 2), keepdim=True), heights.amax((1, 2), keepdim=True)
    return (heights - low) / (high - low)

"""Spatial frequencies of images: ideal filters, and the energy by frequency.

A frequency is f = (f_y, f_x) in cycles per pixel, as `torch.fft.fftfreq` gives them; its radius |f| goes from 0, the
mean, to `HIGHEST` in the corner. Channels are transformed separately.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

HIGHEST = math.sqrt(0.5)  # both axes at the Nyquist frequency, 1/2
ROUNDING = 1e-9  # so that rounding does not move a radius across a bound


def radii(x: Tensor) -> Tensor:
    """(H, W) float64: |f| of each coefficient of images of x's size."""
    rows, columns = (torch.fft.fftfreq(side, dtype=torch.float64, device=x.device) for side in x.shape[2:])
    radius: Tensor = (rows[:, None].square() + columns.square()).sqrt()
    return radius


def low_pass(x: Tensor, cutoff: float) -> Tensor:
    """The components of each image with |f| ≤ cutoff, which include the mean."""
    kept = torch.fft.fft2(x.double()) * (radii(x) <= cutoff + ROUNDING)
    passed: Tensor = torch.fft.ifft2(kept).real.to(x.dtype)
    return passed


def high_pass(x: Tensor, cutoff: float) -> Tensor:
    """The components with |f| > cutoff, without the mean."""
    return x - low_pass(x, cutoff)


def energy_shares(x: Tensor, bins: int) -> Tensor:
    """(B, bins): shares of the energy, over all channels, in rings of equal width from 0 to `HIGHEST`.

    A ring includes its inner bound, the last one also its outer. NaN for an image of zeros.
    """
    power: Tensor = torch.fft.fft2(x.double()).abs().square().sum(1).flatten(1)  # (B, H·W)
    ring = (radii(x) * (bins / HIGHEST) + ROUNDING).long().clamp(max=bins - 1).flatten()
    shares = power.new_zeros(len(x), bins).index_add_(1, ring, power)
    return shares / power.sum(1, keepdim=True)

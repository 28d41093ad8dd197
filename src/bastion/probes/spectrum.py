"""Images by spatial frequency: ideal filters, and where the energy lies.

A frequency is f = (f_y, f_x) in cycles per pixel, as `torch.fft.fftfreq` numbers those of the discrete Fourier
transform; its radius |f| goes from 0, the mean, to `HIGHEST` in the corner. Channels are transformed one by one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

HIGHEST = math.sqrt(0.5)  # both axes at the Nyquist frequency, 1/2
ROUNDING = 1e-9  # a radius that should lie on a bound lies on it


def radii(x: Tensor) -> Tensor:
    """(H, W) float64: |f| of each coefficient of images like x."""
    rows, columns = (torch.fft.fftfreq(side, dtype=torch.float64, device=x.device) for side in x.shape[2:])
    radius: Tensor = (rows[:, None].square() + columns.square()).sqrt()
    return radius


def low_pass(x: Tensor, cutoff: float) -> Tensor:
    """What of each image has |f| ≤ cutoff; the mean always does."""
    kept = torch.fft.fft2(x.double()) * (radii(x) <= cutoff + ROUNDING)
    passed: Tensor = torch.fft.ifft2(kept).real.to(x.dtype)
    return passed


def high_pass(x: Tensor, cutoff: float) -> Tensor:
    """The rest: |f| > cutoff, so without the mean."""
    return x - low_pass(x, cutoff)


def energy_shares(x: Tensor, bins: int) -> Tensor:
    """(B, bins): shares of the squared coefficients of all channels in rings of equal width, 0 to `HIGHEST`.

    A ring has its inner bound, and the last the corner too. NaN for an image of zeros.
    """
    power: Tensor = torch.fft.fft2(x.double()).abs().square().sum(1).flatten(1)  # (B, H·W)
    ring = (radii(x) * (bins / HIGHEST) + ROUNDING).long().clamp(max=bins - 1).flatten()
    shares = power.new_zeros(len(x), bins).index_add_(1, ring, power)
    return shares / power.sum(1, keepdim=True)

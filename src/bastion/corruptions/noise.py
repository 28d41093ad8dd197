"""Noise, independent for each pixel and channel."""

from __future__ import annotations

import torch
from torch import Tensor

from bastion.corruptions.draws import Draws
from bastion.corruptions.poisson import poisson


def gaussian_noise(x: Tensor, draws: Draws, sigma: float) -> Tensor:
    return x + sigma * draws.normal("noise", x.shape[1:])


def speckle_noise(x: Tensor, draws: Draws, sigma: float) -> Tensor:
    """Gaussian noise in proportion to the pixel value."""
    return x + x * (sigma * draws.normal("noise", x.shape[1:]))


def shot_noise(x: Tensor, draws: Draws, photons: int) -> Tensor:
    """Poisson(photons · x) / photons, with x rounded to 8 bits."""
    counts = poisson((x.detach() * 255).round().float(), photons, draws.uniform("noise", x.shape[1:]))
    return counts.to(x.dtype) / photons


def impulse_noise(x: Tensor, draws: Draws, amount: float) -> Tensor:
    """Salt and pepper noise: a share `amount` of all values become 0 or 1, with equal probability."""
    u = draws.uniform("noise", x.shape[1:])
    salted = torch.where(u < amount / 2, torch.ones_like(x), x)
    return torch.where((u >= amount / 2) & (u < amount), torch.zeros_like(x), salted)

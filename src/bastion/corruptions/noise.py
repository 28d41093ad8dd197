"""Noise: each value of each channel for itself."""

from __future__ import annotations

import torch
from torch import Tensor

from bastion.corruptions.draws import Draws
from bastion.corruptions.poisson import poisson


def gaussian_noise(x: Tensor, draws: Draws, sigma: float) -> Tensor:
    return x + sigma * draws.normal("noise", x.shape[1:])


def speckle_noise(x: Tensor, draws: Draws, sigma: float) -> Tensor:
    """Noise in proportion to the value."""
    return x + x * (sigma * draws.normal("noise", x.shape[1:]))


def shot_noise(x: Tensor, draws: Draws, photons: int) -> Tensor:
    """Counts of photons: Poisson(photons · x) / photons. x is taken as 8-bit, as stored images are."""
    counts = poisson((x.detach() * 255).round().float(), photons, draws.uniform("noise", x.shape[1:]))
    return counts.to(x.dtype) / photons


def impulse_noise(x: Tensor, draws: Draws, amount: float) -> Tensor:
    """Salt and pepper: `amount` of all values become 0 or 1, either with the same probability."""
    u = draws.uniform("noise", x.shape[1:])
    salted = torch.where(u < amount / 2, torch.ones_like(x), x)
    return torch.where((u >= amount / 2) & (u < amount), torch.zeros_like(x), salted)

"""Weather: snow, frost, fog, brightness."""

from __future__ import annotations

import torch
from torch import Tensor

from bastion.corruptions.blur import move
from bastion.corruptions.draws import Draws
from bastion.corruptions.filters import enlarge
from bastion.corruptions.plasma import plasma


def snow(
    x: Tensor,
    draws: Draws,
    mean: float,
    std: float,
    zoom: float,
    threshold: float,
    radius: int,
    sigma: float,
    mix: float,
) -> Tensor:
    """Bright flakes with motion blur on a whitened image."""
    noise = mean + std * draws.normal("flakes", (1, *x.shape[-2:]))
    angles = draws.uniform("angle", (), -135.0, -45.0)
    flakes = snow_layer(enlarge(noise, zoom), threshold, angles, radius, sigma)
    return snowed(x, flakes, mix)


def snowed(x: Tensor, flakes: Tensor, mix: float) -> Tensor:
    """The whitened image, plus the flakes, plus the flakes rotated by 180 degrees."""
    whitened = mix * x + (1 - mix) * torch.maximum(x, 1.5 * luma(x) + 0.5)
    return whitened + flakes + flakes.flip(-2, -1)


def snow_layer(noise: Tensor, threshold: float, angles: Tensor, radius: int, sigma: float) -> Tensor:
    """(B, 1, H, W): noise above the threshold, with motion blur; in 8 bits before and after, as in files."""
    kept = torch.where(noise < threshold, torch.zeros_like(noise), noise).clamp(0, 1)
    return (move((kept * 255).floor() / 255, angles, radius, sigma) * 255).round() / 255


def luma(x: Tensor) -> Tensor:
    """(B, 1, H, W): luma of Rec. 601; images of one channel are returned unchanged."""
    if x.shape[1] == 1:
        return x
    return 0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]


def fog(x: Tensor, draws: Draws, strength: float, decay: float) -> Tensor:
    height, width = x.shape[-2:]
    side = 1 << (max(height, width) - 1).bit_length()
    cloud = plasma(draws.uniform("plasma", (side, side), -1.0, 1.0), decay)[:, None, :height, :width]
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + strength * cloud) * (brightest / (brightest + strength))


def brightness(x: Tensor, draws: Draws, amount: float) -> Tensor:
    """Raise the value in HSV by `amount`: colours are scaled, black becomes grey."""
    value = x.amax(1, keepdim=True)
    raised = (value + amount).clamp(max=1)
    return torch.where(value > 0, x * (raised / value.clamp(min=1e-6)), raised)

"""Similarity of images: peak signal-to-noise ratio and structural similarity (Wang et al. 2004)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

WINDOW = 7  # side of the uniform window, in pixels
C1, C2 = 0.01**2, 0.03**2


def psnr(x: Tensor, y: Tensor) -> Tensor:
    """(B,): PSNR in decibels of images in [0, 1]; at most 100."""
    return -10 * (x - y).square().mean((1, 2, 3)).clamp_min(1e-10).log10()


def ssim(x: Tensor, y: Tensor) -> Tensor:
    """(B,): SSIM from -1 to 1, mean over channels and windows."""

    def mean(z: Tensor) -> Tensor:
        return F.avg_pool2d(z, min(WINDOW, *z.shape[2:]), stride=1)

    x_mean, y_mean = mean(x), mean(y)
    x_var, y_var = mean(x * x) - x_mean**2, mean(y * y) - y_mean**2
    covariance = mean(x * y) - x_mean * y_mean
    light = (2 * x_mean * y_mean + C1) / (x_mean**2 + y_mean**2 + C1)
    structure = (2 * covariance + C2) / (x_var + y_var + C2)
    return (light * structure).mean((1, 2, 3))

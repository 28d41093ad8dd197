"""Linear filters along rows and columns as matrices, which hold any border; and resizing as the references do it."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Border = Literal["nearest", "reflect"]


def gaussian(x: Tensor, sigma: float, *, border: Border = "nearest", truncate: float = 4.0) -> Tensor:
    """Gaussian blur of the last two axes, as scipy.ndimage.gaussian_filter and skimage.filters.gaussian."""
    if int(truncate * sigma + 0.5) == 0:
        return x
    rows, columns = (_gaussian_matrix(side, sigma, border, truncate).to(x) for side in x.shape[-2:])
    # Both products are of one image at a time, so that an image's rounding does not depend on what shares its batch.
    return (columns @ (rows @ x).mT).mT


@lru_cache(maxsize=32)
def _gaussian_matrix(side: int, sigma: float, border: Border, truncate: float) -> Tensor:
    """(side, side): row i has the weights of the pixels that make up pixel i."""
    radius = int(truncate * sigma + 0.5)
    offsets = torch.arange(-radius, radius + 1)
    weights = torch.exp(-0.5 * (offsets.double() / sigma) ** 2)
    places = torch.arange(side)[:, None] + offsets
    if border == "nearest":
        places = places.clamp(0, side - 1)
    else:  # the border pixel is repeated: b a | a b c … y z | z y
        places = places % (2 * side)
        places = torch.minimum(places, 2 * side - 1 - places)
    matrix = torch.zeros(side, side, dtype=torch.float64)
    return matrix.scatter_add_(1, places, (weights / weights.sum()).expand(side, -1)).float()


def convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """Correlation with one kernel for all channels, mirrored at the border pixels (`reflect-101`)."""
    r = kernel.shape[-1] // 2
    padded = F.pad(x, (r, r, r, r), mode="reflect")
    if r <= 2:
        return F.conv2d(padded.flatten(0, 1)[:, None], kernel.to(x)[None, None]).view_as(x)
    height, width = (_fast_length(side) for side in padded.shape[-2:])
    spectrum = torch.fft.rfft2(padded, s=(height, width))
    spectrum = spectrum * torch.fft.rfft2(kernel.flip(0, 1).to(x), s=(height, width))
    made: Tensor = torch.fft.irfft2(spectrum, s=(height, width))
    return made[..., 2 * r : 2 * r + x.shape[-2], 2 * r : 2 * r + x.shape[-1]]


def _fast_length(length: int) -> int:
    """The next length whose only prime factors are 2, 3 and 5, and that is a multiple of 16: FFTs of it are fast."""
    candidate = -(-length // 16) * 16
    while not _is_smooth(candidate):
        candidate += 16
    return candidate


def _is_smooth(number: int) -> bool:
    for prime in (2, 3, 5):
        while number % prime == 0:
            number //= prime
    return number == 1


def zoomed_crop(height: int, width: int, factor: float) -> tuple[slice, slice]:
    """The centre that fills the image when it is enlarged by this factor."""
    sides = ((side, math.ceil(side / factor)) for side in (height, width))
    rows, columns = (slice((side - crop) // 2, (side - crop) // 2 + crop) for side, crop in sides)
    return rows, columns


def enlarge(crop: Tensor, factor: float, height: int, width: int) -> Tensor:
    """scipy.ndimage.zoom of order 1, which aligns corner pixels, cut to the centre of height x width."""
    size = [round(side * factor) for side in crop.shape[-2:]]
    grown = F.interpolate(crop, size=size, mode="bilinear", align_corners=True)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return grown[..., top : top + height, left : left + width]

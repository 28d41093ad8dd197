"""Filters along rows and columns as matrices, with any border mode, and resizing as in the reference code."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bastion.errors import BastionError

Border = Literal["nearest", "reflect"]


def gaussian(x: Tensor, sigma: float, *, border: Border = "nearest", truncate: float = 4.0) -> Tensor:
    """Gaussian blur of the last two axes, as scipy.ndimage.gaussian_filter and skimage.filters.gaussian."""
    if int(truncate * sigma + 0.5) == 0:
        return x
    rows, columns = (_gaussian_matrix(side, sigma, border, truncate).to(x) for side in x.shape[-2:])
    # Products of one image at a time, so that rounding does not depend on the rest of the batch.
    return (columns @ (rows @ x).mT).mT


@lru_cache(maxsize=32)
def _gaussian_matrix(side: int, sigma: float, border: Border, truncate: float) -> Tensor:
    """(side, side): row i has the weights of the input pixels for output pixel i."""
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
    if min(x.shape[-2:]) <= r:
        raise BastionError(
            f"a blur of radius {r} needs images of at least {r + 1} pixels a side, got {tuple(x.shape[-2:])}"
        )
    padded = F.pad(x, (r, r, r, r), mode="reflect")
    if r <= 2:
        return F.conv2d(padded.flatten(0, 1)[:, None], kernel.to(x)[None, None]).view_as(x)
    height, width = (_fast_length(side) for side in padded.shape[-2:])
    spectrum = torch.fft.rfft2(padded, s=(height, width))
    spectrum = spectrum * torch.fft.rfft2(kernel.flip(0, 1).to(x), s=(height, width))
    made: Tensor = torch.fft.irfft2(spectrum, s=(height, width))
    return made[..., 2 * r : 2 * r + x.shape[-2], 2 * r : 2 * r + x.shape[-1]]


def _fast_length(length: int) -> int:
    """The next multiple of 16 whose only prime factors are 2, 3 and 5: FFTs of such lengths are fast."""
    candidate = -(-length // 16) * 16
    while not _is_smooth(candidate):
        candidate += 16
    return candidate


def _is_smooth(number: int) -> bool:
    for prime in (2, 3, 5):
        while number % prime == 0:
            number //= prime
    return number == 1


def enlarge(x: Tensor, factor: float) -> Tensor:
    """The image enlarged about its centre and cut to its size, as scipy.ndimage.zoom of order 1 does it."""
    return enlarge_transposed(x.mT.contiguous(), factor)


def enlarge_transposed(x: Tensor, factor: float) -> Tensor:
    """Like `enlarge`, for a transposed image: copying whole rows is faster than copying single pixels."""
    wide = select_rows(x, *_enlarged_places(x.shape[-2], factor)).mT.contiguous()
    return select_rows(wide, *_enlarged_places(x.shape[-1], factor))


def select_rows(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Rows interpolated between row `place` and the next one."""
    places, weights = places.to(x.device), weights.to(x)[:, None]
    after = (places + 1).clamp(max=x.shape[-2] - 1)
    return x.index_select(-2, places).lerp(x.index_select(-2, after), weights)


@lru_cache(maxsize=128)
def _enlarged_places(side: int, factor: float) -> tuple[Tensor, Tensor]:
    """For each output pixel of a line: the input pixel before its position, and the fraction beyond that pixel."""
    crop = math.ceil(side / factor)
    size = round(crop * factor)  # corner pixels are aligned
    places = (torch.arange(side).double() + (size - side) // 2) * ((crop - 1) / max(size - 1, 1)) + (side - crop) // 2
    whole = places.floor()
    return whole.long(), (places - whole).float()

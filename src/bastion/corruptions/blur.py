"""Blurs: defocus, frosted glass, motion, zoom, Gaussian."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from bastion.corruptions.draws import Draws
from bastion.corruptions.filters import convolve, enlarge_transposed, gaussian


def gaussian_blur(x: Tensor, draws: Draws, sigma: float) -> Tensor:
    return gaussian(x, sigma)


def defocus_blur(x: Tensor, draws: Draws, radius: float, alias_sigma: float) -> Tensor:
    return convolve(x, disk(radius, alias_sigma))


@lru_cache(maxsize=16)
def disk(radius: float, alias_sigma: float) -> Tensor:
    """A disk smoothed by a small Gaussian window, as in the published code with OpenCV.

    The disk is mirrored at the border of the grid, and its sum is not normalised afterwards: disks that fill their grid
    (radius 8 and 10) brighten the image by 1 %.
    """
    reach = 8 if radius <= 8 else int(radius)
    line = torch.arange(-reach, reach + 1)
    flat = (line[:, None] ** 2 + line**2 <= radius**2).double()
    steps = torch.arange(-1, 2) if radius <= 8 else torch.arange(-2, 3)
    window = torch.exp(-0.5 * (steps.double() / alias_sigma) ** 2)
    window = window / window.sum()
    padded = F.pad((flat / flat.sum())[None, None], (len(steps) // 2,) * 4, mode="reflect")
    smooth = F.conv2d(padded, window.outer(window)[None, None])[0, 0]
    used = int(line[(smooth > 1e-9).any(0)].abs().max())  # the rest of the grid is practically zero
    return smooth[reach - used : reach + used + 1, reach - used : reach + used + 1].float().contiguous()


def glass_blur(x: Tensor, draws: Draws, sigma: float, reach: int, passes: int) -> Tensor:
    """Blur, exchange pixels with nearby ones, blur."""
    b, height, width = len(x), *x.shape[-2:]
    offsets = draws.integers("offsets", (passes, 2, height, width), -reach, reach)
    source = torch.arange(height * width, device=x.device).expand(b, -1)
    for number in range(passes):
        source = source.gather(1, copied_from(offsets[:, number], reach))
    # Pixels are truncated to 8 bits before they are exchanged, with a straight-through gradient.
    blurred = gaussian(x, sigma)
    stored = blurred - (blurred * 255 - (blurred * 255 + 1e-3).floor()).detach() / 255
    moved = stored.flatten(2).gather(2, source[:, None].expand(-1, x.shape[1], -1)).view_as(x)
    return gaussian(moved, sigma)


def copied_from(offsets: Tensor, reach: int) -> Tensor:
    """(B, H·W): where each pixel comes from after one pass of the published loop, for offsets (dx, dy) (B, 2, H, W).

    The loop goes from the last row and column to the first. Its "swap" is of views of the same array, so it copies the
    neighbour over the pixel. A neighbour that was visited earlier already has the value of its own neighbour, and so
    on; these chains are followed by pointer doubling.
    """
    height, width = offsets.shape[-2:]
    rows, columns = torch.arange(height, device=offsets.device)[:, None], torch.arange(width, device=offsets.device)
    inside = (rows > reach) & (rows <= height - reach) & (columns > reach) & (columns <= width - reach)
    place = rows * width + columns
    source = torch.where(inside, (rows + offsets[:, 1]) * width + columns + offsets[:, 0], place).flatten(1)
    passed_before = (source > place.flatten()) & inside.flatten()[source]
    chain = torch.where(passed_before, source, place.flatten())
    while not torch.equal(further := chain.gather(1, chain), chain):
        chain = further
    return source.gather(1, chain)


def motion_blur(x: Tensor, draws: Draws, radius: int, sigma: float) -> Tensor:
    return move(x, draws.uniform("angle", (), -45.0, 45.0), radius, sigma)


def move(x: Tensor, angles: Tensor, radius: int, sigma: float) -> Tensor:
    """ImageMagick's motion blur: a half Gaussian over 2 · radius + 1 pixels, in each image's direction in degrees."""
    weights = torch.exp(-0.5 * (torch.arange(2 * radius + 1).double() / sigma) ** 2)
    weights = weights / weights.sum()
    taps = int((weights > 1e-7).sum())  # the others are below the precision of float32
    height, width, reach = x.shape[-2], x.shape[-1], taps - 1
    padded = F.pad(x, (reach,) * 4, mode="replicate")
    blurred = []
    for image, angle in zip(padded, angles.tolist(), strict=True):
        sine, cosine = math.sin(math.radians(angle)), math.cos(math.radians(angle))
        total = torch.zeros_like(x[0])
        for i, weight in enumerate(weights[:taps].tolist()):
            top, left = reach + math.ceil(i * sine - 0.5), reach + math.ceil(i * cosine - 0.5)
            total = total.add_(image[:, top : top + height, left : left + width], alpha=weight)
        blurred.append(total)
    return torch.stack(blurred)


def zoom_blur(x: Tensor, draws: Draws, step: float, count: int) -> Tensor:
    """The mean of the image and of its enlargements by 1, 1 + step, …; the image itself counts twice."""
    total, columns = 2 * x, x.mT.contiguous()
    for number in range(1, count):
        total.add_(enlarge_transposed(columns, 1 + number * step))
    return total.div_(count + 1)

"""Digital: contrast, saturation, elastic deformation, pixelation, JPEG."""

from __future__ import annotations

import io
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from bastion.corruptions.draws import Draws
from bastion.corruptions.filters import gaussian
from bastion.errors import BastionError


def contrast(x: Tensor, draws: Draws, factor: float) -> Tensor:
    """Towards the mean of each channel."""
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * factor + mean


def saturate(x: Tensor, draws: Draws, factor: float, amount: float) -> Tensor:
    """HSV's saturation becomes factor · saturation + amount. Grey has the hue of red."""
    if x.shape[1] != 3:
        raise BastionError(f"saturate: needs colour images of 3 channels, got {x.shape[1]}")
    value, darkest = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    saturation = (value - darkest) / value.clamp(min=1e-6)
    wanted = (factor * saturation + amount).clamp(0, 1)
    coloured = value - (value - x) * (wanted / saturation.clamp(min=1e-6))
    reddish = torch.cat([value, (value * (1 - wanted)).expand(-1, 2, -1, -1)], 1)
    return torch.where(saturation > 0, coloured, reddish)


def elastic_transform(x: Tensor, draws: Draws, alpha: float, sigma: float, jitter: float) -> Tensor:
    """A random affine map, then a smooth random field of displacements (Simard et al. 2003)."""
    height, width = x.shape[-2:]
    x = affine(x, draws.uniform("points", (3, 2), -jitter, jitter))
    if alpha == 0:
        return x
    field = draws.uniform("field", (2, height, width), -1.0, 1.0)
    return displace(x, alpha * gaussian(field, sigma, border="reflect", truncate=3.0))


def affine(x: Tensor, moves: Tensor) -> Tensor:
    """The affine map that moves three points around the centre by (dx, dy), (B, 3, 2) pixels."""
    height, width = x.shape[-2:]
    reach = min(height, width) // 3
    around = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64, device=x.device)
    before = torch.tensor([width // 2, height // 2], device=x.device) + reach * around
    after = before + moves.double()
    # `after` -> `before`: where each pixel of the result is taken from.
    matrix = torch.linalg.solve(
        F.pad(after, (0, 1), value=1.0), F.pad(before, (0, 1), value=1.0).expand(len(x), -1, -1)
    )
    rows = torch.arange(height, dtype=torch.float64, device=x.device)
    columns = torch.arange(width, dtype=torch.float64, device=x.device)
    scale, shift = matrix[:, :2, :2, None, None], matrix[:, 2, :2, None, None]
    places = columns * scale[:, 0] + rows[:, None] * scale[:, 1] + shift  # (B, 2, H, W) of x and y
    size = torch.tensor([width, height], dtype=torch.float64, device=x.device)[:, None, None]
    grid = (2 * places / (size - 1) - 1).to(x.dtype)
    return F.grid_sample(x, grid.movedim(1, 3), padding_mode="reflection", align_corners=True)


def displace(x: Tensor, field: Tensor) -> Tensor:
    """Take each pixel from (x + dx, y + dy), for a field (dx, dy) of (B, 2, H, W) pixels."""
    height, width = x.shape[-2:]
    rows = torch.arange(height, dtype=x.dtype, device=x.device)[:, None] + field[:, 1]
    columns = torch.arange(width, dtype=x.dtype, device=x.device) + field[:, 0]
    grid = torch.stack([(2 * columns + 1) / width - 1, (2 * rows + 1) / height - 1], -1)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def pixelate(x: Tensor, draws: Draws, factor: float) -> Tensor:
    """Pillow's box filter down to `factor` of the size, and back. Pillow stores 8 bits after each axis."""
    height, width = x.shape[-2:]
    pixels = (x * 255).round_().mT.contiguous()  # rows are copied whole, so the columns are made rows
    narrow = _box_means(pixels, int(width * factor)).mT.contiguous()
    small = _box_means(narrow, int(height * factor)).div_(255)
    tall = small.index_select(2, _nearest(small.shape[2], height).to(x.device)).mT.contiguous()
    return tall.index_select(2, _nearest(tall.shape[2], width).to(x.device)).mT


def _box_means(x: Tensor, side: int) -> Tensor:
    """Fewer rows, each the mean of some, in whole levels."""
    places, weights = (each.to(x.device) for each in _boxes(x.shape[2], side))
    total = x.index_select(2, places[0]) * weights[0][:, None]
    for place, weight in zip(places[1:], weights[1:], strict=True):
        total = total.addcmul_(x.index_select(2, place), weight[:, None])
    return total.add_(0.5).floor_()


def _nearest(small: int, side: int) -> Tensor:
    return ((torch.arange(side, dtype=torch.float64) + 0.5) * (small / side)).long()


@lru_cache(maxsize=32)
def _boxes(side: int, small: int) -> tuple[Tensor, Tensor]:
    """(most, small): the pixels that each smaller one is the mean of, with their weights."""
    scale = side / small
    centre = (np.arange(small)[:, None] + 0.5) * scale
    distance = (np.arange(side) - centre + 0.5) / scale
    inside = (distance > -0.5) & (distance <= 0.5)
    most = int(inside.sum(1).max())
    places = np.argsort(~inside, axis=1, kind="stable")[:, :most]
    weights = np.take_along_axis(inside, places, 1) / inside.sum(1, keepdims=True)
    return torch.from_numpy(places.T.copy()), torch.from_numpy(weights.T.copy()).float()


def jpeg_compression(x: Tensor, draws: Draws, quality: int) -> Tensor:
    return jpeg(x, quality)


def jpeg(x: Tensor, quality: int) -> Tensor:
    """The image stored as JPEG by Pillow, with chroma at half the resolution, and read back."""
    pixels = (x.detach() * 255).add_(0.5).to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu().numpy()
    for image in pixels if x.shape[1] == 3 else pixels[..., 0]:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        file.seek(0)
        with Image.open(file, formats=("JPEG",)) as picture:
            image[:] = np.asarray(picture)
    return (torch.from_numpy(pixels).permute(0, 3, 1, 2).to(x) / 255).contiguous()

"""Digital corruptions: contrast, saturation, elastic transform, pixelation, JPEG."""

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
    """Scale the difference from the mean of each channel by `factor`."""
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * factor + mean


def saturate(x: Tensor, draws: Draws, factor: float, amount: float) -> Tensor:
    """The saturation in HSV becomes factor · saturation + amount. Grey pixels have the hue of red."""
    if x.shape[1] != 3:
        raise BastionError(f"saturate: needs colour images of 3 channels, got {x.shape[1]}")
    value, darkest = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    saturation = (value - darkest) / value.clamp(min=1e-6)
    wanted = (factor * saturation + amount).clamp(0, 1)
    coloured = value - (value - x) * (wanted / saturation.clamp(min=1e-6))
    reddish = torch.cat([value, (value * (1 - wanted)).expand(-1, 2, -1, -1)], 1)
    return torch.where(saturation > 0, coloured, reddish)


def elastic_transform(x: Tensor, draws: Draws, alpha: float, sigma: float, jitter: float) -> Tensor:
    """A random affine map, then a smooth random displacement field (Simard et al. 2003)."""
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
    rows, row_places = _boxes(height, int(height * factor))
    columns, column_places = _boxes(width, int(width * factor))
    rows, columns = rows.to(x), columns.to(x)
    # Sums of integers are exact in any order, so that the result does not depend on the rest of the batch.
    narrow = _mean((x * 255).round_() @ columns.mT, columns.sum(1))
    small = _mean(rows @ narrow, rows.sum(1, keepdim=True)).div_(255)
    wide = small.gather(3, column_places.to(x.device).expand(*small.shape[:3], -1))
    return wide.index_select(2, row_places.to(x.device))


def _mean(total: Tensor, count: Tensor) -> Tensor:
    """The mean, rounded to integers."""
    return total.add_(count / 2).div_(count).floor_()


@lru_cache(maxsize=32)
def _boxes(side: int, small: int) -> tuple[Tensor, Tensor]:
    """(small, side): 1 for the pixels that each smaller one is the mean of; (side,): the smaller one for each pixel."""
    scale, pixels = side / small, torch.arange(side, dtype=torch.float64)
    centre = (torch.arange(small, dtype=torch.float64)[:, None] + 0.5) * scale
    distance = (pixels - centre + 0.5) / scale  # Pillow's arithmetic, which decides ties
    return ((distance > -0.5) & (distance <= 0.5)).float(), ((pixels + 0.5) * (small / side)).long()


def jpeg_compression(x: Tensor, draws: Draws, quality: int) -> Tensor:
    return jpeg(x, quality)


def jpeg(x: Tensor, quality: int) -> Tensor:
    """The image stored as JPEG by Pillow, with chroma at half the resolution, and read back."""
    size = x.shape[3], x.shape[2]
    # (B, H, C, W), Pillow's line-interleaved layout: copying whole lines is faster than copying single pixels.
    mode, layout = ("RGB", "RGB;L") if x.shape[1] == 3 else ("L", "L")
    pixels = (x.detach() * 255).add_(0.5).to(torch.uint8).transpose(1, 2).contiguous().cpu().numpy()
    for image in pixels:
        file = io.BytesIO()
        Image.frombytes(mode, size, image, "raw", layout).save(file, "JPEG", quality=quality)
        # The decoder directly: Image.open would parse the headers in Python first.
        picture = Image.frombytes(mode, size, file.getvalue(), "jpeg", mode, "")
        image[:] = np.frombuffer(picture.tobytes("raw", layout), np.uint8).reshape(image.shape)
    return torch.from_numpy(pixels).transpose(1, 2).to(x, memory_format=torch.contiguous_format).div_(255)

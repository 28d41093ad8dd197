"""Geometric transforms, the same for all images of a batch, sampled as by Pillow and OpenCV; outside is black."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F


def translate(x: Tensor, pixels: int) -> Tensor:
    """Shift to the right, or to the left if negative."""
    width = x.shape[-1]
    return F.pad(x, (max(pixels, 0), max(-pixels, 0)))[..., max(-pixels, 0) :][..., :width]


def affine(x: Tensor, *, angle: float = 0.0, scale: float = 1.0, shear: float = 0.0) -> Tensor:
    """Rotate clockwise, scale and shear, with angles in degrees and Pillow's bilinear sampling.

    The fixed point is the pixel (H/2, W/2), half a pixel off the centre, as in the torchvision that made ImageNet-P.
    """
    height, width = x.shape[-2:]
    turned, sheared = math.radians(angle), math.radians(angle + shear)
    size = scale * math.cos(sheared - turned)
    rows, columns = _places(x)
    down, right = rows - height / 2, columns - width / 2
    rows = (math.cos(turned) * down - math.sin(turned) * right) / size + height / 2
    columns = (math.sin(sheared) * down + math.cos(sheared) * right) / size + width / 2
    # A pixel extends half a pixel beyond its centre.
    inside = (rows >= -0.5) & (rows < height - 0.5) & (columns >= -0.5) & (columns < width - 0.5)
    return _bilinear(x, rows, columns, outside="border") * inside


def tilt(x: Tensor, angle: float) -> Tensor:
    """Rotate the image in space by `angle` degrees about both of its axes, with OpenCV's bilinear sampling."""
    height, width = x.shape[-2:]
    rows, columns = _places(x)
    source = torch.linalg.inv(tilt_matrix(height, width, angle)).to(x.device)
    moved = torch.einsum("ij,jhw->ihw", source, torch.stack([columns, rows, torch.ones_like(rows)]))
    columns, rows = moved[0] / moved[2], moved[1] / moved[2]
    return _bilinear(x, rows, columns, outside="zeros")


def tilt_matrix(height: int, width: int, angle: float) -> Tensor:
    """(3, 3): the homography of (column, row, 1). The distance of the camera is the length of the diagonal.

    The published code places the image one pixel behind the projection plane, so that it shrinks a little even at 0
    degrees.
    """
    sine, cosine = math.sin(math.radians(angle)), math.cos(math.radians(angle))
    far = math.hypot(height, width)
    centred = torch.tensor([[1, 0, -width / 2], [0, 1, -height / 2], [0, 0, 1]], dtype=torch.float64)
    about_x = torch.tensor([[1, 0, 0], [0, cosine, -sine], [0, sine, cosine]], dtype=torch.float64)
    about_y = torch.tensor([[cosine, 0, -sine], [0, 1, 0], [sine, 0, cosine]], dtype=torch.float64)
    in_space = about_x @ about_y @ centred
    in_space[2, 2] += far
    return torch.tensor([[far, 0, width / 2], [0, far, height / 2], [0, 0, 1]], dtype=torch.float64) @ in_space


def _places(x: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of each pixel, (H, W) each."""
    sides = [torch.arange(side, dtype=torch.float64, device=x.device) for side in x.shape[-2:]]
    rows, columns = torch.meshgrid(sides, indexing="ij")
    return rows, columns


def _bilinear(x: Tensor, rows: Tensor, columns: Tensor, *, outside: Literal["border", "zeros"]) -> Tensor:
    """The images sampled at these positions (H, W); in double precision, so that integer positions are exact."""
    height, width = x.shape[-2:]
    grid = torch.stack([2 * columns / (width - 1) - 1, 2 * rows / (height - 1) - 1], -1).expand(len(x), -1, -1, -1)
    return F.grid_sample(x.double(), grid, padding_mode=outside, align_corners=True).to(x.dtype)

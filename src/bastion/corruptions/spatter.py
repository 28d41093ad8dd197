"""Spatter: drops of water or mud on the lens. The OpenCV functions of the published code are implemented in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from bastion.corruptions.draws import Draws
from bastion.corruptions.filters import gaussian
from bastion.corruptions.weather import luma

_WATER = (175 / 255, 238 / 255, 238 / 255)  # pale turquoise
_MUD = (63 / 255, 42 / 255, 20 / 255)
_FAR = 20  # distances from an edge, in pixels, are clipped to this


def spatter(
    x: Tensor, draws: Draws, mean: float, std: float, blur: float, threshold: float, strength: float, mud: bool
) -> Tensor:
    noise = mean + std * draws.normal("liquid", (1, *x.shape[-2:]))
    liquid = gaussian(noise, blur)
    if mud:
        cover = gaussian((liquid > threshold).to(x.dtype), strength)
        cover = torch.where(cover < 0.8, torch.zeros_like(cover), cover)
        return x * (1 - cover) + cover * _colour(_MUD, x)
    liquid = torch.where(liquid < threshold, torch.zeros_like(liquid), liquid)
    return splashed(x, liquid, strength)


def splashed(x: Tensor, liquid: Tensor, strength: float) -> Tensor:
    """Add drops of water to the image."""
    return x + water(liquid) * strength * _colour(_WATER, x)


def _colour(rgb: tuple[float, float, float], x: Tensor) -> Tensor:
    """(1, C, 1, 1): the colour, as grey for images of one channel."""
    colour = x.new_tensor(rgb)[None, :, None, None]
    return luma(colour) if x.shape[1] == 1 else colour


def water(liquid: Tensor) -> Tensor:
    """(B, 1, H, W) in [0, 1]: drops with light edges, from the thickness of the liquid."""
    thickness = (liquid * 255).floor().clamp(0, 255)
    depth = distance_to(canny(thickness, 50, 150))
    depth = equalise(_box(depth).add(1e-4).floor())
    light = thickness * _box(_emboss(depth)).add(0.5).floor()
    return light / light.amax((1, 2, 3), keepdim=True).clamp(min=1e-6)


def _mirrored(x: Tensor) -> Tensor:
    return F.pad(x, (1, 1, 1, 1), mode="reflect")


def _emboss(x: Tensor) -> Tensor:
    """Correlation with ((-2, -1, 0), (-1, 1, 1), (0, 1, 2)), cut to 8 bits."""
    at = _neighbours(_mirrored(x))
    slope = at(1, 1).sub(at(-1, -1)).mul_(2).add_(at(0, 1)).sub_(at(0, -1)).add_(at(1, 0)).sub_(at(-1, 0))
    return slope.add_(x).clamp_(0, 255)


def _neighbours(padded: Tensor) -> Callable[[int, int], Tensor]:
    """A function of (row, column) that gives the neighbour at this offset of each pixel, for an image padded by one."""
    height, width = padded.shape[-2] - 2, padded.shape[-1] - 2
    return lambda row, column: padded[..., 1 + row : 1 + row + height, 1 + column : 1 + column + width]


def _box(x: Tensor) -> Tensor:
    """The mean of 3 x 3 pixels."""
    return _three_by_three(_mirrored(x)) / 9


def _three_by_three(x: Tensor) -> Tensor:
    """The 3 x 3 sum around each inner pixel, by four additions, which is cheaper than pooling or convolving."""
    rows = x[..., :-2, :] + x[..., 1:-1, :] + x[..., 2:, :]
    return rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]


def canny(x: Tensor, low: float, high: float) -> Tensor:
    """Edges by Canny (1986) of images (B, 1, H, W) with 8-bit values, as cv2.Canny finds them; bool."""
    padded = F.pad(x, (1, 1, 1, 1), mode="replicate")
    across = padded[..., 2:] - padded[..., :-2]  # (B, 1, H + 2, W)
    dx = across[..., :-2, :] + 2 * across[..., 1:-1, :] + across[..., 2:, :]
    down = padded[..., 2:, :] - padded[..., :-2, :]
    dy = down[..., :-2] + 2 * down[..., 1:-1] + down[..., 2:]
    steep = dx.abs() + dy.abs()
    candidate = (steep > low) & _is_ridge(steep, dx, dy)
    edges = candidate & (steep > high)
    while True:  # hysteresis: weak edges count if they touch an edge
        grown = (_three_by_three(F.pad(edges.byte(), (1, 1, 1, 1))) > 0) & candidate
        if torch.equal(grown, edges):
            return edges
        edges = grown


def _is_ridge(steep: Tensor, dx: Tensor, dy: Tensor) -> Tensor:
    """Steeper than both neighbours along the gradient, which is rounded to eight directions."""
    at = _neighbours(F.pad(steep, (1, 1, 1, 1)))
    tangent = 13573 / 2**15  # of 22.5 degrees, as OpenCV rounds it
    flat = dy.abs() < tangent * dx.abs()
    upright = dy.abs() > (tangent + 2) * dx.abs()
    horizontal = steep > torch.maximum(at(0, -1), at(0, 1) - 1)  # of whole numbers: >= the second
    vertical = steep > torch.maximum(at(-1, 0), at(1, 0) - 1)
    falling = steep > torch.maximum(at(-1, -1), at(1, 1))
    rising = steep > torch.maximum(at(-1, 1), at(1, -1))
    opposed = dx * dy < 0
    diagonal = (opposed & rising) | (~opposed & falling)  # torch.where is many times slower on bool
    return (flat & horizontal) | (upright & vertical) | (~(flat | upright) & diagonal)


def distance_to(edges: Tensor) -> Tensor:
    """Euclidean distance to the nearest edge pixel, at most 20. OpenCV's is an approximation of it to 2 %."""
    vertical = (~edges).to(torch.int16) * _FAR  # small integers are twice as fast as float32
    for step in (1, 2, 4, 8, 16):  # reaches 31 rows
        after, before = vertical[..., step:, :], vertical[..., :-step, :]
        torch.minimum(after, before + step, out=after)
        torch.minimum(before, after + step, out=before)
    nearest, width = vertical**2, edges.shape[-1]
    squared = F.pad(nearest, (_FAR, _FAR), value=_FAR**2)
    for shift in range(1, _FAR):
        left, right = (squared[..., start : start + width] for start in (_FAR - shift, _FAR + shift))
        nearest = torch.minimum(nearest, torch.minimum(left, right).add_(shift**2))
    return nearest.float().sqrt_()


def equalise(x: Tensor) -> Tensor:
    """Histogram equalisation of images (B, 1, H, W) with the values 0 to 20, as cv2.equalizeHist."""
    levels = x.flatten(1).long()
    counts = torch.zeros(len(x), _FAR + 1, device=x.device).scatter_add_(1, levels, torch.ones_like(x.flatten(1)))
    total = counts.cumsum(1)
    first = counts.gather(1, (counts > 0).int().argmax(1, keepdim=True))  # of the lowest level that occurs
    rest = levels.shape[1] - first
    # An image of a single level stays as it is.
    table = torch.where(
        rest > 0, ((total - first) * (255 / rest.clamp(min=1))).round().clamp(0, 255), levels[:, :1].float()
    )
    return table.gather(1, levels).view_as(x)

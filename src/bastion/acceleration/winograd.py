"""3×3 convolutions with a quarter of the multiplications (Winograd; Lavin & Gray 2016), where that is faster.

A line of six inputs and three weights are polynomials, and four outputs are read off their product. So both are
evaluated at six points, multiplied there, and taken back; in two dimensions, at all pairs of points. All of it is
matrix products, which torch makes at the processor's peak, as it makes a plain convolution.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

TILE = 4  # outputs a side that are made together
# The sixth is infinity. Points that are each other's reciprocals keep rounding at twice a plain convolution's.
POINTS = (0.0, 2 / 3, -2 / 3, 3 / 2, -3 / 2)
SIX = len(POINTS) + 1
AT_ONCE = 2  # rows of points: what is made of them on the way stays in the processor's cache

# What it costs, in multiplications of a plain convolution; `benchmarks/winograd.py` measures it.
PRODUCT = 1.2  # each of inputs and weights
TRANSFORM = 2.2  # each on the way to the points and back: thin products, which threads do not share well
WEIGHT = 18.0  # each weight, to fetch it from memory once for all images of a batch
CALL = 6e6  # each time


class Winograd(nn.Conv2d):
    """A convolution whose weights do not change any more."""

    def __init__(self, plain: nn.Conv2d) -> None:
        super().__init__(plain.in_channels, plain.out_channels, 3, padding=1, device="meta")
        self.weight, self.bias = plain.weight, plain.bias
        self.train(plain.training)

    @staticmethod
    def fits(plain: nn.Module) -> bool:
        """Is it a convolution of the kind that can be made so, and nothing else?"""
        if type(plain) is not nn.Conv2d or "forward" in vars(plain):
            return False
        if any((plain._forward_hooks, plain._forward_pre_hooks, plain._backward_hooks, plain._backward_pre_hooks)):
            return False
        shape = (plain.kernel_size, plain.stride, plain.padding, plain.dilation, plain.groups, plain.padding_mode)
        return shape == ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros") and plain.weight.dtype == torch.float32

    def forward(self, x: Tensor) -> Tensor:
        fits = isinstance(x, Tensor) and x.ndim == 4 and x.dtype == torch.float32 and x.device.type == "cpu"
        if not fits or not self.pays(*x.shape):
            return super().forward(x)
        y: Tensor = Product.apply(x, self.spectrum, self.bias, Transforms.across(*x.shape[2:]))  # type: ignore[no-untyped-call]
        return y

    def pays(self, batch: int, channels: int, height: int, width: int) -> bool:
        rows, columns = _tiles(height), _tiles(width)
        weights, threads = channels * self.out_channels, torch.get_num_threads()
        product = SIX**2 * rows * columns * weights
        transform = (channels + self.out_channels) * SIX * rows * width * (height + SIX * columns)
        cost = batch * (PRODUCT * product + TRANSFORM * threads * transform)
        cost += WEIGHT * SIX**2 * weights + CALL * threads
        return cost < batch * 9 * height * width * weights

    @cached_property
    def spectrum(self) -> Tensor:
        """(36, in, out) the weights at all pairs of points."""
        powers = _powers(3)
        values = torch.einsum("ur,oirs,vs->uvio", powers, self.weight.detach().double(), powers)
        return values.flatten(0, 1).to(self.weight.dtype).contiguous()


class Transforms(NamedTuple):
    """From the pixels of an image to the points of its tiles, and back."""

    rows: Tensor  # (6 · tiles, height)
    columns: Tensor  # (6 · tiles, width)
    rows_back: Tensor  # (height, 6 · tiles)
    columns_back: Tensor  # (width, 6 · tiles)

    @classmethod
    def across(cls, height: int, width: int) -> Transforms:
        (rows, rows_back), (columns, columns_back) = _there_and_back(height), _there_and_back(width)
        return cls(rows, columns, rows_back, columns_back)

    @property
    def reversed(self) -> Transforms:
        """For gradients."""
        return Transforms(self.rows_back.T, self.columns_back.T, self.rows.T, self.columns.T)


class Product(torch.autograd.Function):
    """(B, C, H, W) images times weights at all pairs of points, (36, C, K); channels last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spectrum: Tensor, bias: Tensor | None, transforms: Transforms) -> Tensor:
        ctx.spectrum, ctx.transforms = spectrum, transforms
        (batch, channels, height, width), out = x.shape, spectrum.shape[2]
        lines = x.permute(0, 2, 3, 1).reshape(batch, height, width * channels)
        tall = torch.bmm(transforms.rows.expand(batch, -1, -1), lines).view(batch, SIX, -1, width, channels)
        tall = tall.permute(1, 3, 2, 0, 4).reshape(SIX, width, -1)
        points, columns = len(transforms.columns), tall.shape[2] // channels
        made = x.new_empty(SIX, width, columns * out)
        wide = x.new_empty(AT_ONCE, points, columns * channels)
        product = x.new_empty(AT_ONCE * SIX, points // SIX * columns, out)
        there, back = (way.expand(AT_ONCE, -1, -1) for way in (transforms.columns, transforms.columns_back))
        for first in range(0, SIX, AT_ONCE):
            last = first + AT_ONCE
            torch.bmm(there, tall[first:last], out=wide)
            torch.bmm(wide.view(len(product), -1, channels), spectrum[SIX * first : SIX * last], out=product)
            torch.bmm(back, product.view(AT_ONCE, points, -1), out=made[first:last])
        made = made.view(SIX, width, -1, batch, out).permute(3, 0, 2, 1, 4).reshape(batch, -1, width * out)
        y = torch.empty(batch, out, height, width, dtype=x.dtype, memory_format=torch.channels_last)
        lines = y.permute(0, 2, 3, 1).view(batch, height, width * out)
        start = x.new_zeros(()) if bias is None else bias.repeat(width)
        torch.baddbmm(start, transforms.rows_back.expand(batch, -1, -1), made, beta=int(bias is not None), out=lines)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """A product of the same kind, the other way round."""
        turned = ctx.spectrum.transpose(1, 2)
        slope: Tensor = Product.apply(gradient, turned, None, ctx.transforms.reversed)  # type: ignore[no-untyped-call]
        return slope, None, None, None


def _tiles(length: int) -> int:
    return -(-length // TILE)


@cache
def _there_and_back(length: int) -> tuple[Tensor, Tensor]:
    """(6 · tiles, length) from a line of pixels, zero beyond its ends, to the points; and back to as many pixels."""
    tiles = _tiles(length)
    there, back = torch.linalg.inv(_powers(SIX).T), _powers(TILE).T
    into = torch.zeros(SIX, tiles, TILE * tiles + 2, dtype=torch.float64)  # with one pixel beyond each end
    out = torch.zeros(TILE * tiles, SIX, tiles, dtype=torch.float64)
    for tile in range(tiles):
        first = TILE * tile
        into[:, tile, first : first + SIX] = there
        out[first : first + TILE, :, tile] = back
    return into[:, :, 1 : length + 1].flatten(0, 1).float(), out[:length].flatten(1).float()


def _powers(count: int) -> Tensor:
    """(6, count) the first powers of each point; of infinity only the last counts."""
    points = torch.tensor(POINTS, dtype=torch.float64)
    infinity = torch.eye(count, dtype=torch.float64)[-1:]
    return torch.cat([points[:, None] ** torch.arange(count), infinity])

"""Rectangles in images, one in each: where their pixels are, and what a convolution makes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

Pair = tuple[int, int]


class Window(NamedTuple):
    """So many rows and columns, from these on in each image."""

    size: Pair
    start: Tensor  # int64 (2, B)

    def take(self, images: Tensor) -> Window:
        return Window(self.size, self.start[:, images])

    def moved(self, by: Tensor | int) -> Window:
        return Window(self.size, self.start + by)

    def places(self, image: Pair, images: Tensor | None = None) -> Tensor:
        """(B, h · w) of its pixels in a list of those of all images, of which it may have some only."""
        top, left = self.start
        first = firsts(len(top), math.prod(image)) if images is None else images * math.prod(image)
        places: Tensor = (top * image[1] + left + first)[:, None] + _grid(*self.size, image[1])
        return places

    def is_inside(self, other: Window) -> bool:
        spare = other.size[0] - self.size[0], other.size[1] - self.size[1]
        offset = self.start - other.start
        return bool(((offset >= 0) & (offset <= column(spare))).all())

    def inside(self, image: Pair) -> Tensor:
        """(B, h · w) bool: which of its pixels are inside images of this size?"""
        rows, columns = (
            start[:, None] + torch.arange(length) for start, length in zip(self.start, self.size, strict=True)
        )
        rows, columns = (rows >= 0) & (rows < image[0]), (columns >= 0) & (columns < image[1])
        pixels: Tensor = rows[:, :, None] & columns[:, None, :]
        return pixels.flatten(1)


class Grown(NamedTuple):
    """What a convolution makes of a window: images of another size, a larger window, and what it is made of."""

    image: Pair
    window: Window
    seen: Window

    @classmethod
    def by(cls, source: Pair, window: Window, kernel: Pair, stride: Pair, margin: Pair, dilation: Pair) -> Grown:
        image, size, seen = [], [], []
        reach = kernel[0] * dilation[0] - dilation[0], kernel[1] * dilation[1] - dilation[1]
        for axis in (0, 1):
            image.append((source[axis] + 2 * margin[axis] - reach[axis] - 1) // stride[axis] + 1)
            size.append(min((window.size[axis] - 1 + reach[axis]) // stride[axis] + 1, image[axis]))
            seen.append((size[axis] - 1) * stride[axis] + reach[axis] + 1)
        steps, edge = column(stride), column(margin)
        first = window.start + (edge - column(reach))  # pixel of the first that sees any of the window …
        if stride != (1, 1):
            first = -(-first // steps)  # … and its own place
        start = within(first, [whole - own for whole, own in zip(image, size, strict=True)])
        corner = start if stride == (1, 1) else start * steps
        return cls(pair(image), Window(pair(size), start), Window(pair(seen), corner - edge))


def within(start: Tensor, last: Sequence[int]) -> Tensor:
    """(2, B) as near as can be, but from 0 to these."""
    if last[0] == last[1]:
        return start.clamp(0, last[0])
    return start.clamp(min=0).minimum(torch.tensor(last)[:, None])


def column(numbers: Pair) -> Tensor | int:
    """One number for both axes, or a column of two."""
    return numbers[0] if numbers[0] == numbers[1] else torch.tensor(numbers)[:, None]


@lru_cache(64)
def firsts(images: int, pixels: int) -> Tensor:
    """(images,) places of the first pixel of each."""
    return torch.arange(images) * pixels


@lru_cache(256)
def _grid(height: int, width: int, line: int) -> Tensor:
    """(height · width,) places of a window's pixels, where so many make a line."""
    return (torch.arange(height)[:, None] * line + torch.arange(width)).flatten()


def pair(value: Any) -> Pair:
    first, second = value if isinstance(value, (tuple, list)) else (value, value)
    return int(first), int(second)

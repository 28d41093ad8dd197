"""The grid of patches of an image: numbers of patches, and masks of their pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bastion import rng
from bastion.errors import BastionError

ROUNDING = 1e-9  # so that 0.1 · 30 gives 3 patches, not 4


def token_grid(tokens: int, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the patch tokens, the largest grid with the image's aspect ratio; other tokens are extra."""
    common = math.gcd(height, width)
    rows, columns = height // common, width // common
    side = math.isqrt(tokens // (rows * columns))
    if not side:
        raise BastionError(f"{tokens} tokens are no grid of an image of {height}×{width}")
    return side * rows, side * columns


@dataclass(frozen=True)
class Grid:
    """The patches of an image, numbered row by row; those at the right and bottom edges may be smaller."""

    height: int
    width: int
    size: int

    @classmethod
    def of(cls, x: Tensor, size: int) -> Grid:
        height, width = x.shape[2:]
        if size > max(height, width):
            raise BastionError(f"patches of {size}×{size} pixels are larger than the image of {height}×{width}")
        return cls(height, width, size)

    @property
    def shape(self) -> tuple[int, int]:
        return -(-self.height // self.size), -(-self.width // self.size)

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def share(self, share: float) -> int:
        """The number of patches in a share of all: ⌈share · count⌉, as in RSPC, and at least one."""
        return max(1, math.ceil(share * self.count - ROUNDING))

    def numbers(self, device: torch.device) -> Tensor:
        """(H, W): the number of the patch that each pixel belongs to."""
        rows = torch.arange(self.height, device=device) // self.size
        columns = torch.arange(self.width, device=device) // self.size
        return rows[:, None] * self.shape[1] + columns

    def sums(self, pixels: Tensor) -> Tensor:
        """(B, count): the sum of (B, H, W) over the pixels of each patch."""
        sums = pixels.new_zeros(len(pixels), self.count)
        return sums.index_add_(1, self.numbers(pixels.device).flatten(), pixels.flatten(1))

    def mask(self, chosen: Tensor) -> Tensor:
        """(B, 1, H, W) bool: the pixels of the patches whose numbers (B, n) are given."""
        picked = torch.zeros(len(chosen), self.count, dtype=torch.bool, device=chosen.device)
        return picked.scatter(1, chosen, True)[:, self.numbers(chosen.device)][:, None]

    def random(self, index: Tensor, count: int, *, seed: int, draw: int) -> Tensor:
        """(B, count) numbers of different patches, drawn for each example by its index."""
        scores = rng.uniform(seed, index, draw, (self.count,), dtype=torch.float64)
        return self.highest(scores, count)

    def highest(self, scores: Tensor, count: int) -> Tensor:
        """(B, count) numbers of the patches with the highest of the scores (B, patches), the highest first."""
        return scores.argsort(stable=True, dim=1, descending=True)[:, :count]

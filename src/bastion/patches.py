"""The grid of patches of an image: numbers of patches, and masks of their pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bastion import rng
from bastion.errors import BastionError
from bastion.forward import in_mode
from bastion.types import Tapped

MAX_PATCHES = 256  # by default, as the corruption model of RSPC has a weight for each pair of patches
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

    @classmethod
    def tiling(cls, shape: Sequence[int], size: int) -> Grid:
        """Of images (C, H, W) that the patches cover without smaller ones at the edges."""
        _, height, width = shape
        if size < 1 or height % size or width % size:
            side = math.gcd(height, width)
            fitting = ", ".join(str(each) for each in range(1, side + 1) if side % each == 0)
            raise BastionError(
                f"patch_size: patches of {size} pixels do not tile images of {height}×{width}; of {fitting} do"
            )
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


def default_patch_size(outputs: Sequence[Sequence[int]], shape: Sequence[int]) -> int:
    """The patch size in pixels that tiles the image and is nearest to the size of the model's tokens.

    Tokens are those of the first attention block with at most `MAX_PATCHES` of them, given the shapes of the blocks'
    outputs: a ViT's own patches, and patches of 16 pixels for Swin at 224.
    """
    _, height, width = shape
    grids = [_grid(output, height, width) for output in outputs]
    rows, _ = next((grid for grid in grids if math.prod(grid) <= MAX_PATCHES), grids[-1])
    side = math.gcd(height, width)
    tiles = [size for size in range(side, 0, -1) if side % size == 0]
    return min(tiles, key=lambda size: abs(math.log(size * rows / height)))


def _grid(output: Sequence[int], height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the tokens in an output of (tokens, channels), (channels, H, W) or (H, W, channels)."""
    if len(output) == 2:
        return token_grid(output[0], height, width)
    first, second, third = output
    return (second, third) if second * width == third * height else (first, second)


def attention_outputs(model: nn.Module, shape: Sequence[int]) -> dict[str, Tensor]:
    """The output of each block with self-attention, for two images of this shape."""
    if not isinstance(model, Tapped):
        return {}
    weights = next(model.parameters())
    with torch.no_grad(), in_mode(model, training=False), model.tap("blocks") as taps:
        model(torch.zeros(2, *shape, device=weights.device, dtype=weights.dtype))
    found = {block.name: taps.blocks[block.name] for block in model.blocks() if block.attends}
    for name, output in found.items():
        if len(output) != 2 or output.ndim not in (3, 4):
            given = tuple(output.shape)
            raise BastionError(f"the outputs of block {name} are not of tokens: of two images they are {given}")
    return found

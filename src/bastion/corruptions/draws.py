"""Random numbers of a corruption: a pure function of seed, corruption, severity, example and purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bastion import rng


@dataclass(frozen=True)
class Draws:
    """Random numbers for the examples of a batch. Each 64-bit hash gives two, as hashing is most of the cost."""

    index: Tensor  # int64 (B,)
    seed: int
    name: str  # corruption and severity

    def uniform(self, what: str, shape: Sequence[int], low: float = 0.0, high: float = 1.0) -> Tensor:
        """(B, *shape) float32 in [low, high)."""
        unit = ((self._halves(what, shape) >> 8) & 0xFFFFFF).float().mul_(2.0**-24)
        return unit if (low, high) == (0.0, 1.0) else unit.mul_(high - low).add_(low)

    def normal(self, what: str, shape: Sequence[int]) -> Tensor:
        """(B, *shape) float32, standard normal, by the Box-Muller transform."""
        count = math.prod(shape)
        first, second = self._halves(what, (2, -(-count // 2))).unbind(1)
        # 31 bits, in (0, 1]: more precision for small numbers, which give the tails.
        radius = (first & 0x7FFFFFFF).float().add_(1.0).mul_(2.0**-31).log_().mul_(-2.0).sqrt_()
        angle = second.float().mul_(2.0 * math.pi * 2.0**-32)
        return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :count].reshape(-1, *shape)

    def integers(self, what: str, shape: Sequence[int], low: int, high: int) -> Tensor:
        """(B, *shape) int64 in {low, …, high - 1}."""
        return rng.integers(self.seed, self.index, f"{self.name}/{what}", shape, low=low, high=high)

    def _halves(self, what: str, shape: Sequence[int]) -> Tensor:
        """(B, *shape) int32, all bits random."""
        count = math.prod(shape)
        words = rng.bits(self.seed, self.index, f"{self.name}/{what}", (-(-count // 2),))
        return words.view(torch.int32)[:, :count].reshape(-1, *shape)

"""The reference's Square Attack with bastion's random numbers: what then differs is the attack, not its luck."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from pyautoattack.square import SquareAttack
from torch import Tensor, nn

from bastion import rng
from bastion.attacks import Threat
from bastion.attacks.square import TILES

NORMS = {"linf": "Linf", "l2": "L2", "l1": "L1"}  # as others call them


class SameDraws(SquareAttack):  # type: ignore[misc]
    """Each image gets the numbers that bastion's Square draws for example 0, and squares reach the last row and column.

    The reference's squares are the same for a whole batch. So give bastion a batch whose `index` is 0 throughout.
    """

    @classmethod
    def of(cls, model: nn.Module, threat: Threat, queries: int = 5000, seed: int = 0) -> SameDraws:
        """With the settings of AutoAttack."""
        settings = {"p_init": 0.8, "seed": seed, "device": "cpu", "resc_schedule": False}
        return cls(model, NORMS[threat.norm], queries, threat.eps, **settings)

    def attack_single_run(self, x: Tensor, y: Tensor) -> Any:
        numbers = draws(self.norm, x.shape[1:], self.seed)

        def rand(shape: Sequence[int]) -> Tensor:
            one = shape[1:] if len(shape) == 4 else shape  # without the images
            drawn = torch.tensor([next(numbers) for _ in range(math.prod(one))])
            return drawn.view(*one).expand(*shape)

        with patch.object(torch, "rand", rand):
            return super().attack_single_run(x, y)

    def random_int(self, low: int = 0, high: int = 1, shape: Sequence[int] = (1,)) -> Any:
        return super().random_int(low, high + 1, shape)


def draws(norm: str, image: Sequence[int], seed: int) -> Iterator[float]:
    """In [0, 1), in the order in which the reference asks for them: the start's first, then those of each query."""
    channels, height, width = image
    example = torch.zeros(1, dtype=torch.int64)
    if norm == "Linf":
        signs = rng.signs(seed, example, rng.key("square", "stripes"), (channels, 1, width))[0]
        yield from (0.5 + signs / 4).flatten().tolist()
        each = 2 + channels
    else:
        side = height // TILES
        tiles = (channels + 1, height // side, width // side)
        signs = rng.signs(seed, example, rng.key("square", "tiles"), tiles)[0].movedim(0, -1)  # tile by tile
        signs[..., 0] *= -1  # bastion leaves a pattern upright for a positive sign, the reference for a low number
        yield from (0.5 + signs / 4).flatten().tolist()
        each = 5 + channels
    query = rng.key("square")
    while True:
        yield from rng.uniform(seed, example, query, (each,))[0].tolist()
        query += 1

"""The validation split: a fixed part of the training images, the same in every run and on every machine."""

from __future__ import annotations

import torch
from torch import Tensor

from bastion import rng

_PERCENT = 10
_MOST = 100  # a class: 1,000 images choose a CIFAR-10 model well enough, the others are better spent on training


def carve(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the images to train on and of those to validate with, each in ascending order.

    A class gives 10 % of its images, rounded up, at most 100, and keeps at least one to train on. Which ones
    is no part of any run's seed: runs that differ in it must choose and learn from the same images.
    """
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in sorted(set(labels.tolist())):
        members = (labels == label).nonzero().flatten()
        order = rng.permutation(0, f"validation/{label}", len(members))
        chosen[members[order[: held_out(len(members))]]] = True
    return (~chosen).nonzero().flatten(), chosen.nonzero().flatten()


def held_out(members: int) -> int:
    """How many of a class's images are for validation."""
    return min(-(-members * _PERCENT // 100), _MOST, members - 1)

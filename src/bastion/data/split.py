"""The validation split: a fixed part of the training images, the same in every run and on every machine."""

from __future__ import annotations

import torch
from torch import Tensor

from bastion import rng
from bastion.types import Split

_PERCENT = 10
_MOST = 100  # per class: 1,000 images are enough to select a CIFAR-10 model, the others are better used for training


def train_val_split(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of training and of validation images, each in ascending order.

    10 % of each class, rounded up, at most 100, are for validation; at least one is for training. The split does not
    depend on the run's seed: runs with different seeds must train and select on the same images.
    """
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in sorted(set(labels.tolist())):
        members = (labels == label).nonzero().flatten()
        order = rng.permutation(0, f"validation/{label}", len(members))
        chosen[members[order[: held_out(len(members))]]] = True
    return (~chosen).nonzero().flatten(), chosen.nonzero().flatten()


def held_out(members: int) -> int:
    """Return how many of a class's images are for validation."""
    return min(-(-members * _PERCENT // 100), _MOST, members - 1)


def limited(split: Split, limit: int | None) -> Split:
    """Return the first so many images of a split; None: all."""
    return split if limit is None or limit >= len(split) else split.subset(range(limit))

"""Forty images of three colours, made in no time: files are tortured here, not networks."""

from __future__ import annotations

import numpy as np

from bastion.data import datasets
from bastion.data.arrays import ArraySplit
from bastion.types import DataSet


@datasets.register("colours")
def colours() -> DataSet:
    """16 images for training, 12 for validation and 12 for testing, 8×8."""
    draw = np.random.default_rng(0)
    labels = np.arange(40, dtype=np.uint8) % 3
    pictures = draw.integers(0, 120, (40, 8, 8, 3), dtype=np.uint8)
    pictures[np.arange(40), :, :, labels] += 80
    every = ArraySplit(pictures, labels)
    return DataSet(
        name="colours",
        classes=("red", "green", "blue"),
        shape=(3, 8, 8),
        mean=(0.4, 0.4, 0.4),
        std=(0.2, 0.2, 0.2),
        train=every.subset(range(16)),
        val=every.subset(range(16, 28)),
        test=every.subset(range(28, 40)),
        fingerprint="colours-1",
    )

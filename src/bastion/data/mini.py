"""cifar10-mini: a small part of CIFAR-10 that ships with the package and needs no network.

The first 400 images of each class of CIFAR-10's training set and the first 100 of each class of its test set,
in their original order. `scripts/make_cifar10_mini.py` makes the two files from `cifar10`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from bastion.data import datasets
from bastion.data.arrays import ArrayData, Pixels, digests, verifiers
from bastion.data.cifar import CIFAR10
from bastion.errors import BastionError
from bastion.storage import Arrays
from bastion.types import DataSet

_FOLDER = Path(__file__).parent / "embedded"
# Lossless WebP: 20 % smaller than PNG, decoded as fast, and viewable.
MOSAIC = _FOLDER / "cifar10-mini.webp"
LABELS = _FOLDER / "cifar10-mini.labels.txt"  # one digit per image: a line for train, a line for test

CIFAR10_MINI = ArrayData(
    name="cifar10-mini",
    classes=CIFAR10.classes,
    mean=CIFAR10.mean,
    std=CIFAR10.std,
    pinned={
        "train_images": "53981c081145185e466a75a2d38b4f9e339f21369fb0a8ec72698ed5d9568ab3",
        "train_labels": "5d60d326d3ca3b6f16d99fef0b1575bf7c79a7760e7616ec97fa7b56cacc00ee",
        "test_images": "cc2bd4479eda140793858a9ea7f9016e6870fefd7f69f172720267e933ec44a5",
        "test_labels": "bf5fd7ab55257c7eeece32a36d229c4767d2479b59c8d506b7e35494f9cbf574",
    },
)


def decode() -> Arrays:
    """Decode and check the embedded arrays."""
    try:
        with Image.open(MOSAIC, formats=["WEBP"]) as picture:
            images = _tiles(np.asarray(picture.convert("RGB")))
        train, test = (
            np.frombuffer(line.encode(), dtype=np.uint8) - ord("0") for line in LABELS.read_text().splitlines()
        )
    except (OSError, ValueError) as error:
        raise BastionError(f"{_FOLDER}: not readable ({error}); install bastion again") from error
    arrays = {
        "train_images": images[: len(train)],
        "train_labels": train,
        "test_images": images[len(train) :],
        "test_labels": test,
    }
    return CIFAR10_MINI.checked(arrays, str(_FOLDER))


def _tiles(mosaic: Pixels) -> Pixels:
    """Return (N, 32, 32, 3) from a picture of N tiles, row by row."""
    height, width, channels = mosaic.shape
    tiles = mosaic.reshape(height // 32, 32, width // 32, 32, channels).swapaxes(1, 2)
    return tiles.reshape(-1, 32, 32, channels)


@datasets.register("cifar10-mini")
def cifar10_mini() -> DataSet:
    """400 + 100 images of each class of CIFAR-10, inside the package."""
    return CIFAR10_MINI.data_set(_decoded())


@cache
def _decoded() -> Arrays:
    """Cached per process: decoding takes a quarter of a second."""
    return decode()


verifiers["cifar10-mini"] = lambda: digests(decode())

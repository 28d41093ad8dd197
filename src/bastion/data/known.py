"""Sizes of known data sets, to plan a run without their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL.Image import Image

from bastion.data.split import held_out
from bastion.errors import BastionError, did_you_mean
from bastion.types import Batch, DataSet, Split


@dataclass(frozen=True)
class Size:
    train: int  # images; some of them are held out for validation
    test: int
    classes: int
    shape: tuple[int, int, int]  # as registered; data sets with an option `size` have that
    about: str = ""  # note on the numbers


SIZES = {
    "cifar10": Size(50_000, 10_000, 10, (3, 32, 32)),
    "cifar100": Size(50_000, 10_000, 100, (3, 32, 32)),
    "mnist": Size(60_000, 10_000, 10, (1, 28, 28)),
    "fashion-mnist": Size(60_000, 10_000, 10, (1, 28, 28)),
    "imagenet": Size(1_281_167, 50_000, 1000, (3, 224, 224)),
    "imagenet-100": Size(128_117, 5_000, 100, (3, 224, 224), "a tenth of ImageNet; it depends on the classes"),
    "imagenette": Size(9_469, 3_925, 10, (3, 224, 224)),
    "flowers102": Size(2_040, 6_149, 102, (3, 224, 224), "its training and validation images"),
    "caltech101": Size(3_060, 6_084, 102, (3, 224, 224), "30 images of each class, the background's among them"),
}


def outline(spec: Mapping[str, Any]) -> DataSet:
    """Return a data set without images: lengths, number of classes and shape are right for classes of equal size."""
    name = spec["name"]
    if name not in SIZES:
        raise BastionError(f"nothing is known of the data set '{name}' without its files{did_you_mean(name, SIZES)}")
    size = SIZES[name]
    channels, side = size.shape[0], spec.get("size")
    val = size.classes * held_out(round(size.train / size.classes))
    return DataSet(
        name=name,
        classes=tuple(map(str, range(size.classes))),
        shape=(channels, side, side) if side else size.shape,
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
        train=PlaceholderSplit(name, size.train - val),
        val=PlaceholderSplit(name, val),
        test=PlaceholderSplit(name, size.test),
        fingerprint=f"outline of {name}",
    )


class PlaceholderSplit(Split):
    """A split with a length but no images."""

    def __init__(self, name: str, length: int) -> None:
        self.name = name
        self.index = torch.arange(length)
        self.labels = torch.zeros_like(self.index)

    def image(self, position: int) -> Image:
        raise self._absent()

    def batch(self, positions: Sequence[int]) -> Batch:
        raise self._absent()

    def digest(self) -> str:
        raise self._absent()

    def subset(self, positions: Sequence[int]) -> PlaceholderSplit:
        return PlaceholderSplit(self.name, len(positions))

    def _absent(self) -> BastionError:
        return BastionError(f"data set '{self.name}': this is its outline, without pictures; get the data set itself")

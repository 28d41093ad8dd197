"""The training images: a data set's own, and extra ones of the same classes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from PIL.Image import Image
from torch import Tensor

from bastion.data import datasets
from bastion.data.arrays import ArraySplit, TensorSplit
from bastion.errors import BastionError
from bastion.recipe import Extra
from bastion.types import DataSet, Split

_INDEX_OFFSET = 1 << 32  # between the indices of two splits, more than any split's length


class Pool:
    """Concatenated splits. Extra splits without a share form one source with the data set's own images; each of the
    others is a source that makes up its share of every batch.

    All randomness of an image depends on its index, so the indices of the n-th extra split start at n · 2³².
    """

    def __init__(self, own: Split, extra: Sequence[tuple[Split, float | None]] = ()) -> None:
        numbered = [(own, None, 0), *((split, share, n * _INDEX_OFFSET) for n, (split, share) in enumerate(extra, 1))]
        numbered.sort(key=lambda each: each[1] is not None)
        self.splits = [split for split, _, _ in numbered]
        self.index = torch.cat([split.index + offset for split, _, offset in numbered])
        self.labels = torch.cat([split.labels for split in self.splits])
        self.starts = list(accumulate((len(split) for split in self.splits), initial=0))
        self.shares = [share for _, share, _ in numbered if share is not None]

    @property
    def sources(self) -> list[range]:
        """Ranges of positions that are shuffled together, the data set's own first."""
        bounds = [0, *self.starts[len(self.splits) - len(self.shares) :]]
        return [range(first, last) for first, last in pairwise(bounds)]

    def image(self, position: int) -> Image:
        which = bisect_right(self.starts, position) - 1
        return self.splits[which].image(position - self.starts[which])

    def pixels(self, positions: Tensor) -> Tensor | None:
        """Return uint8 (B, C, H, W), or floats in [0, 1] if a split has those; None unless all are of one size and in
        memory."""
        arrays = [split for split in self.splits if isinstance(split, ArraySplit | TensorSplit)]
        if len(arrays) < len(self.splits) or len({split.shape for split in arrays}) > 1:
            return None
        floats = any(isinstance(split, TensorSplit) for split in arrays)
        pixels = torch.empty(len(positions), *arrays[0].shape, dtype=torch.float32 if floats else torch.uint8)
        for start, split in zip(self.starts, arrays, strict=False):
            inside = (start <= positions) & (positions < start + len(split))
            own = split.pixels(positions[inside] - start)
            pixels[inside] = own / 255 if floats and own.dtype == torch.uint8 else own
        return pixels


def build_extra(extra: Sequence[Extra], data: DataSet) -> list[DataSet]:
    """Build the data sets of a recipe's `extra`; raise if their classes or channels differ from `data`."""
    built = [datasets.build(each.data.plain(), f"extra.{number}.data") for number, each in enumerate(extra)]
    for number, each in enumerate(built):
        _check(each, data, f"extra.{number}.data")
    return built


def _check(extra: DataSet, data: DataSet, where: str) -> None:
    """Check channels and classes; names are not compared if the classes are just numbers."""
    if not len(extra.train):
        raise BastionError(f"{where}: {extra.name} has no training images; leave it out")
    if extra.shape[0] != data.shape[0]:
        raise BastionError(
            f"{where}: its images have {extra.shape[0]} channels, those of {data.name} have {data.shape[0]}"
        )
    if len(extra.classes) != len(data.classes):
        raise BastionError(
            f"{where}: has {len(extra.classes)} classes, but {data.name} has {len(data.classes)}; they must be the "
            "same (for a .npz file in which some are missing, give their number as `classes`)"
        )
    if _named(extra.classes) and _named(data.classes) and extra.classes != data.classes:
        label = next(n for n, name in enumerate(data.classes) if extra.classes[n] != name)
        raise BastionError(
            f"{where}: class {label} is '{extra.classes[label]}', but '{data.classes[label]}' in {data.name}; they "
            "must have the same names in the same order"
        )


def _named(classes: Sequence[str]) -> bool:
    return list(classes) != [str(number) for number in range(len(classes))]

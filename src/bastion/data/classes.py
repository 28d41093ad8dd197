"""Selects some classes of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from PIL.Image import Image
from torch import Tensor

from bastion.errors import BastionError, did_you_mean
from bastion.storage import fingerprint
from bastion.types import Batch, DataSet, Split


class SomeClasses(Split):
    """The images of a split whose class is selected (has a new number, not -1). They keep their index."""

    def __init__(self, split: Split, numbers: Tensor) -> None:
        self._numbers = numbers  # (K,) of the old classes
        self._split = split.subset((numbers[split.labels] >= 0).nonzero().flatten().tolist())
        self.index, self.labels = self._split.index, numbers[self._split.labels]

    def image(self, position: int) -> Image:
        return self._split.image(position)

    def batch(self, positions: Sequence[int]) -> Batch:
        return self._split.batch(positions)._replace(y=self.labels[torch.as_tensor(positions, dtype=torch.long)])

    def digest(self) -> str:
        return self._split.digest()

    def subset(self, positions: Sequence[int]) -> SomeClasses:
        return SomeClasses(self._split.subset(positions), self._numbers)


def select_classes(data: DataSet, names: Sequence[str]) -> DataSet:
    """Return the data set with these classes only, in this order."""
    for name in names:
        if name not in data.classes:
            raise BastionError(f"data set '{data.name}': no class '{name}'{did_you_mean(name, data.classes)}")
    if len(set(names)) < len(names):
        raise BastionError(f"data set '{data.name}': a class is chosen twice among {len(names)}; name each once")
    numbers = torch.tensor([names.index(name) if name in names else -1 for name in data.classes])
    return replace(
        data,
        classes=tuple(names),
        train=SomeClasses(data.train, numbers),
        val=SomeClasses(data.val, numbers),
        test=SomeClasses(data.test, numbers),
        fingerprint=fingerprint([data.fingerprint, list(names)]),
        columns=data.columns and tuple(data.columns[data.classes.index(name)] for name in names),
    )

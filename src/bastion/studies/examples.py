"""The examples that studies use: the first of a split."""

from __future__ import annotations

from typing import Literal

from bastion.errors import BastionError
from bastion.types import Batch, DataSet

SplitName = Literal["train", "val", "test"]


def first_examples(data: DataSet, split: SplitName, n: int, where: str) -> Batch:
    """The first `n` examples of a split; `where` names the setting that n comes from, for the error message."""
    available = len(data.split(split))
    if n > available:
        raise BastionError(
            f"{where}: the {split} split of {data.name} has {available} images, got {n}; ask for fewer, or of another "
            "split"
        )
    batch = data.split(split).batch(range(n))
    return batch.check(len(data.classes), where)

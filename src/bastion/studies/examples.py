"""The examples that studies look at a model on: the first of a split, always the same."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from bastion.errors import BastionError
from bastion.types import Batch, DataSet

SplitName = Literal["train", "val", "test"]


def first_examples(data: DataSet, split: SplitName, n: int, where: str) -> Batch:
    """`where` names the setting that asks for so many."""
    available = len(getattr(data, split))
    if n > available:
        raise BastionError(
            f"{where}: the {split} split of {data.name} has {available} images, got {n}; ask for fewer, or of another "
            "split"
        )
    batch: Batch = getattr(data, split).batch(range(n))
    return batch.check(len(data.classes), where)


def device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in model.state_dict().values()), torch.device("cpu"))

"""Models measured on a subset of their classes: one of ImageNet's 1,000 classes on the 200 of ImageNet-A."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bastion import rng
from bastion.errors import BastionError
from bastion.forward import Delegate, Wrapped, device_of, in_mode
from bastion.models.classifier import Classifier
from bastion.types import DataSet


class ChosenClasses(Delegate):
    """A model with the logits of only some of its classes, for attacks too."""

    inner = "whole"
    whole: nn.Module

    def __init__(self, whole: nn.Module, columns: tuple[int, ...]) -> None:
        super().__init__(whole)
        self.columns, self.num_classes = columns, len(columns)
        self.register_buffer("_chosen", torch.tensor(columns, device=device_of(whole)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = self.whole(x)[:, self._chosen]
        return chosen


def with_columns(model: nn.Module, data: DataSet) -> nn.Module:
    """The model restricted to the classes of the data set, in their order, if its own classes differ."""
    if data.columns is None:
        return model
    count = num_outputs(model, rng.uniform(0, torch.arange(1), "columns", data.shape))
    if count is None:
        return model
    return take_columns(model, count, data.columns, f"the class map of {data.name}")


def take_columns(model: nn.Module, count: int, columns: tuple[int, ...], what: str) -> nn.Module:
    """The model with these of its `count` outputs.

    If there are as many columns as outputs, but with other numbers, the model was trained on these very classes and is
    returned unchanged.
    """
    if len(columns) == count and set(columns) != set(range(count)):
        return model
    if max(columns) >= count:
        raise BastionError(
            f"{what} names output {max(columns)}, but the model has {count}, from 0 to {count - 1}; measure a model of "
            "the map's classes, or give another map"
        )
    return model if columns == tuple(range(count)) else ChosenClasses(model, columns)


def columns_of(model: nn.Module) -> tuple[int, ...] | None:
    """The outputs that a model was restricted to by `take_columns`; None: all."""
    given = model.original if isinstance(model, Wrapped) else model
    return given.columns if isinstance(given, ChosenClasses) else None


def num_outputs(model: nn.Module, image: Tensor) -> int | None:
    """The number of logits for an image (1, C, H, W); None if the model does not run on it or returns no logits."""
    if isinstance(model, Classifier):
        return model.num_classes
    try:
        with torch.no_grad(), in_mode(model, training=False), rng.preserved():
            return int(model(image.to(device_of(model))).shape[1])
    except Exception:  # a user's model may raise anything; `measure` reports it in full
        return None

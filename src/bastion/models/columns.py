"""A model of many classes on a data set with some of them: ImageNet's 1,000 on the 200 of ImageNet-A."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bastion import rng
from bastion.errors import BastionError
from bastion.forward import Wrapped, in_mode
from bastion.models.classifier import Classifier
from bastion.types import DataSet


class ChosenClasses(nn.Module):
    """A model's logits of some of its classes. To whoever runs it, attacks too, the others do not exist."""

    def __init__(self, whole: nn.Module, columns: tuple[int, ...]) -> None:
        super().__init__()
        self.whole, self.columns, self.num_classes = whole, columns, len(columns)
        device = next((tensor.device for tensor in whole.state_dict().values()), None)
        self.register_buffer("_chosen", torch.tensor(columns, device=device), persistent=False)
        self.training = whole.training  # its own flag only: parts of the model may be in another mode

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = self.whole(x)[:, self._chosen]
        return chosen

    def __getattr__(self, name: str) -> Any:
        """Whatever else the model has, such as `tap`; but not what says how it is copied."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return getattr(super().__getattr__("whole"), name)


def with_columns(model: nn.Module, data: DataSet) -> nn.Module:
    """The model with the data set's classes alone, in its order, where it has more of them or another order."""
    if data.columns is None:
        return model
    count = num_outputs(model, rng.uniform(0, torch.arange(1), "columns", data.shape))
    if count is None:
        return model
    return take_columns(model, count, data.columns, f"the class map of {data.name}")


def take_columns(model: nn.Module, count: int, columns: tuple[int, ...], what: str) -> nn.Module:
    """These of the model's `count` outputs.

    A model of just as many outputs whose numbers are not the columns' was made for these classes, and stays as it is.
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
    """Which of its outputs a model is measured on, if not on all."""
    given = model.given if isinstance(model, Wrapped) else model
    return given.columns if isinstance(given, ChosenClasses) else None


def num_outputs(model: nn.Module, image: Tensor) -> int | None:
    """For (1, C, H, W). None: the model does not take such images, or gives no logits."""
    if isinstance(model, Classifier):
        return model.num_classes
    device = next((tensor.device for tensor in model.state_dict().values()), None)
    try:
        with torch.no_grad(), in_mode(model, training=False), rng.preserved():
            return int(model(image.to(device)).shape[1])
    except Exception:  # whatever a stranger's model does: `measure` tells it in full
        return None

"""Standard training: cross-entropy on the images as they are."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from bastion.training.objectives import objectives
from bastion.types import Batch, Example, Losses, Objective


@objectives.register("standard")
class Standard(Objective):
    """Cross-entropy on the images as they are."""

    def __init__(self, *, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.label_smoothing = checked_smoothing(label_smoothing)

    def prepare(self, model: nn.Module, batch: Batch, *, progress: float, seed: int) -> Example:
        return Example(batch, batch.x, {})

    def loss(self, model: nn.Module, example: Example) -> Losses:
        return cross_entropy(model, example, self.label_smoothing)


def checked_smoothing(value: float) -> float:
    if not 0 <= value < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), got {value}")
    return value


def cross_entropy(model: nn.Module, example: Example, label_smoothing: float) -> Losses:
    """The outer loss of every objective that only changes the input; hard and soft labels alike."""
    logits = model(example.x)
    return Losses(F.cross_entropy(logits, example.clean.y, label_smoothing=label_smoothing), logits, {})

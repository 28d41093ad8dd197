"""Standard training: cross-entropy on the images as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from bastion.training.objectives import objectives
from bastion.training.objectives.attacked import check_smoothing
from bastion.types import Batch, Example, Losses, Objective


@objectives.register("standard")
@dataclass(eq=False, kw_only=True)
class Standard(Objective):
    """Cross-entropy on the images as they are."""

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__init__()
        check_smoothing(self.label_smoothing)

    def prepare(self, model: nn.Module, batch: Batch, *, progress: float, seed: int) -> Example:
        return Example(batch, batch.x, {})

    def loss(self, model: nn.Module, example: Example) -> Losses:
        return cross_entropy(model, example, self.label_smoothing)


def cross_entropy(model: nn.Module, example: Example, label_smoothing: float) -> Losses:
    """The outer loss of every objective that only changes the input; hard and soft labels alike."""
    logits = model(example.x)
    return Losses(F.cross_entropy(logits, example.clean.y, label_smoothing=label_smoothing), logits, {})

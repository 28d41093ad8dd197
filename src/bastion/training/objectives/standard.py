"""Standard training: cross-entropy on the images as they are."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from bastion.settings import Smoothing, settings
from bastion.training.objectives import objectives
from bastion.types import Losses, Objective, Prepared


@objectives.register("standard")
@settings(frozen=False, eq=False)
class Standard(Objective):
    """Cross-entropy on the images as they are."""

    label_smoothing: Smoothing = 0.0

    def loss(self, model: nn.Module, prepared: Prepared) -> Losses:
        return cross_entropy(model, prepared, self.label_smoothing)


def cross_entropy(model: nn.Module, prepared: Prepared, label_smoothing: float) -> Losses:
    """The outer loss of every objective that only changes the input; hard and soft labels alike."""
    logits = model(prepared.x)
    return Losses(F.cross_entropy(logits, prepared.clean.y, label_smoothing=label_smoothing), logits, {})

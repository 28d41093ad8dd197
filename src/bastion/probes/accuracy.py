"""Clean accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from bastion.attacks.asking import logits_of
from bastion.attacks.losses import misclassified
from bastion.probes import probes
from bastion.types import Batch, Probe


@probes.register("accuracy")
@dataclass(frozen=True)
class Accuracy(Probe):
    """Is the image as it comes classified right?"""

    role = "clean"
    facts: ClassVar[Mapping[str, str]] = {
        "correct": "the prediction is the label",
        "prediction": "the class with the largest logit",
    }

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        with torch.no_grad():
            logits = logits_of(model, batch.x)
        return {"correct": ~misclassified(logits, batch.y), "prediction": logits.argmax(1)}

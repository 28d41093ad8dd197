"""Clean accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from bastion import forward
from bastion.forward import misclassified
from bastion.probes import probes
from bastion.settings import settings
from bastion.types import Batch, Probe


@probes.register("accuracy")
@settings(kw_only=False)
class Accuracy(Probe):
    """Accuracy on the images as they are."""

    role = "clean"
    facts: ClassVar[Mapping[str, str]] = {
        "correct": "the prediction is the label",
        "prediction": "the class with the largest logit",
    }

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        with torch.no_grad():
            logits = forward.logits(model, batch.x)
        return {"correct": ~misclassified(logits, batch.y), "prediction": logits.argmax(1)}

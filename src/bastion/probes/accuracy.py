"""Clean accuracy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bastion import forward
from bastion.forward import misclassified
from bastion.probes import probes
from bastion.types import Batch


@probes.register("accuracy")
@dataclass(frozen=True)
class Accuracy:
    """Is the clean image classified right?"""

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        with torch.no_grad():
            logits = forward.logits(model, batch.x)
        return {"correct": ~misclassified(logits, batch.y), "prediction": logits.argmax(1)}

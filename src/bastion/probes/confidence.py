"""The confidence of a model in its prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from bastion import forward
from bastion.probes import probes
from bastion.settings import settings
from bastion.types import Batch, Fact, Probe


@probes.register("confidence")
@settings(kw_only=False)
class Confidence(Probe):
    """The softmax probability of the predicted class. A mean far above the accuracy is overconfidence."""

    facts: ClassVar[Mapping[str, str | Fact]] = {
        "confidence": Fact("softmax probability of the predicted class", "share")
    }

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        with torch.no_grad():
            logits = forward.logits(model, batch.x)
        return {"confidence": logits.float().softmax(1).amax(1)}

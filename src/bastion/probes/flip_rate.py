"""The flip rate of ImageNet-P and CIFAR-10-P: how often the prediction changes along a perturbation sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from bastion import forward
from bastion.corruptions import VERSION
from bastion.corruptions.sequences import LENGTH, PerturbationName, compares_with_first, frames
from bastion.probes import probes
from bastion.settings import settings
from bastion.types import Batch, Description, Fact, Probe


@probes.register("flip-rate")
@settings(kw_only=False)
class FlipRate(Probe):
    """The share of a sequence's frames whose prediction differs from that of the previous frame.

    Frames of noise are compared with the first one, the clean image. Labels are not used. Hendrycks and Dietterich
    2019, Sec. 4.2, call it flip probability.
    """

    perturbation: PerturbationName

    role = "corruption"
    facts: ClassVar[Mapping[str, str | Fact]] = {
        "flip_rate": Fact(
            "share of frames whose prediction differs from the previous frame's; for noise, the clean image's",
            "error rate",
        )
    }

    def describe(self) -> Description:
        return Description(revisions=(VERSION,), passes=LENGTH)  # of most sequences

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        before, flips, compared = None, torch.zeros(len(batch.x), device=batch.x.device), 0
        for frame in frames(batch.x, self.perturbation, index=batch.index, seed=seed):
            with torch.no_grad():
                prediction = forward.logits(model, frame).argmax(1)
            if before is not None:
                flips, compared = flips + (prediction != before), compared + 1
            if before is None or not compares_with_first(self.perturbation):
                before = prediction
        return {"flip_rate": flips / compared}

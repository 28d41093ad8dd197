"""Accuracy and confidence when some patches are occluded (Guo et al. 2023, Figs. 2, 4 and 6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from bastion import journal
from bastion.acceleration import accelerate
from bastion.forward import check_batch, misclassified, precise, predict
from bastion.probes import probes
from bastion.probes.occluded import OccludedProbe, true_class
from bastion.settings import settings
from bastion.types import Batch, Fact, hard


@probes.register("occlusion")
@settings
class Occlusion(OccludedProbe):
    """Accuracy and confidence in the true class under given masks, also of images that are misclassified when clean.

    `correct` is for the first mask; `share_right` is the mean over all masks.
    """

    name = "occlusion"
    facts: ClassVar[Mapping[str, str | Fact]] = {
        "correct": "right under the first mask",
        "share_right": Fact("share of the masks under which the prediction is right", "accuracy"),
        "confidence": Fact("probability of the true class, mean over the masks", "share"),
        "confidence_std": "its standard deviation over the masks",
        "confidence_min": Fact("its minimum over the masks", "share"),
        "clean_correct": "right on the clean image",
        "clean_confidence": Fact("probability of the true class on the clean image", "share"),
        "right_by_mask": "right under each mask",
        "confidence_by_mask": "probability of the true class under each mask",
        **journal.PASSES,
    }

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        accelerated = accelerate(model)
        given, batch = check_batch(model, batch, "probe occlusion")
        batch, grid = self.at_mask_size(given, batch._replace(y=hard(batch.y)))
        shape = len(batch.x), self.masks
        right = torch.zeros(shape, dtype=torch.bool, device=batch.x.device)
        sure = batch.x.new_zeros(shape)
        first = batch.x.clone()
        with journal.opened() as notes, accelerated.ready(batch.x):
            clean = precise(predict(given, batch), batch.x)
            for positions, chunks in self.full_batches(batch, accelerated.batch_size):
                some = batch.select(positions)
                for numbers in chunks:
                    shown = self.occluded(some, grid, numbers, seed=seed)
                    logits = precise(predict(given, shown), shown.x)
                    cells = positions[:, None], torch.tensor(numbers, device=positions.device)
                    right[cells] = ~misclassified(logits, shown.y).view(len(numbers), -1).T
                    sure[cells] = true_class(logits, shown.y).view(len(numbers), -1).T
                    if 0 in numbers:
                        first[positions] = shown.x[: len(positions)]
        return {
            "correct": right[:, 0],
            "share_right": right.float().mean(1),
            "confidence": sure.mean(1).float(),
            "confidence_std": sure.std(1, correction=0).float(),
            "confidence_min": sure.amin(1).float(),
            "clean_correct": ~misclassified(clean, batch.y),
            "clean_confidence": true_class(clean, batch.y).float(),
            "right_by_mask": right,
            "confidence_by_mask": sure.half(),
            **notes.passes(batch.index),
            "clean": batch.x,
            "occluded": first,
        }

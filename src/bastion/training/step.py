"""One step's pieces: the module that is differentiated, and parts of a batch made one again."""

from __future__ import annotations

import torch
from torch import nn

from bastion.models import Classifier
from bastion.types import Batch, Example, Losses, Objective


class Step(nn.Module):
    """From an example to its loss. What all processes take the mean gradient of; the inner attack is no part of it."""

    def __init__(self, model: Classifier, objective: Objective, l1: float) -> None:
        super().__init__()
        self.model, self.objective, self.l1 = model, objective, l1

    def forward(self, example: Example) -> Losses:
        losses = self.objective.loss(self.model, example)
        if not self.l1:
            return losses
        size = torch.stack([weights.abs().sum() for weights in self.model.parameters()]).sum()
        return losses._replace(total=losses.total + self.l1 * size, terms={**losses.terms, "l1": size})


def joined(examples: list[Example]) -> Example:
    """The parts of a batch as one again."""
    if len(examples) == 1:
        return examples[0]
    clean = Batch.cat([example.clean for example in examples])
    unchanged = all(example.x is example.clean.x for example in examples)
    return Example(clean, clean.x if unchanged else torch.cat([each.x for each in examples]), examples[-1].notes)


def mean(parts: list[Losses]) -> Losses:
    """Of losses of equal parts of a batch; the logits of all, without their graph."""
    clean = [part.clean.detach() for part in parts if part.clean is not None]
    return Losses(
        torch.stack([part.total.detach() for part in parts]).mean(),
        torch.cat([part.logits.detach() for part in parts]),
        {name: torch.stack([part.terms[name].detach() for part in parts]).mean() for name in parts[0].terms},
        torch.cat(clean) if clean else None,
    )

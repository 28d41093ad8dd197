"""The loss of a training step, and joining the parts of a batch with gradient accumulation."""

from __future__ import annotations

import torch
from torch import nn

from bastion.models import Classifier
from bastion.types import Batch, Losses, Objective, Prepared


class StepLoss(nn.Module):
    """The objective's loss as a module, for DDP, without the inner attack."""

    def __init__(self, model: Classifier, objective: Objective, l1: float) -> None:
        super().__init__()
        self.model, self.networks = model, objective.networks
        self.objective, self.l1 = objective, l1

    def forward(self, prepared: Prepared) -> Losses:
        losses = self.objective.loss(self.model, prepared)
        if not self.l1:
            return losses
        size = torch.stack([weights.abs().sum() for weights in self.model.parameters()]).sum()
        return losses._replace(total=losses.total + self.l1 * size, terms={**losses.terms, "l1": size})


def concatenated(parts: list[Prepared]) -> Prepared:
    """The parts of a batch joined."""
    if len(parts) == 1:
        return parts[0]
    clean = Batch.cat([part.clean for part in parts])
    unchanged = all(part.x is part.clean.x for part in parts)
    return Prepared(clean, clean.x if unchanged else torch.cat([part.x for part in parts]), parts[-1].notes)


def mean_losses(parts: list[Losses]) -> Losses:
    """The mean over equal parts of a batch, detached; logits are joined."""
    clean = [part.clean.detach() for part in parts if part.clean is not None]
    return Losses(
        torch.stack([part.total.detach() for part in parts]).mean(),
        torch.cat([part.logits.detach() for part in parts]),
        {name: torch.stack([part.terms[name].detach() for part in parts]).mean() for name in parts[0].terms},
        torch.cat(clean) if clean else None,
    )

"""What an attack maximises: one value per example from logits and labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bastion.errors import BastionError
from bastion.types import hard

Loss = Callable[[Tensor, Tensor], Tensor]  # logits (B, K), y (B,) or (B, K) -> (B,)
LossName = Literal["ce", "margin", "dlr"]


def ce(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy, hard or soft labels."""
    return F.cross_entropy(logits, y, reduction="none")


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """Largest wrong logit minus the right one: positive exactly when fooled."""
    labels = hard(y)[:, None]
    others = logits.scatter(1, labels, -torch.inf)
    return others.amax(1) - logits.gather(1, labels)[:, 0]


def dlr(logits: Tensor, y: Tensor) -> Tensor:
    """Difference of logits ratio (Croce and Hein 2020, Eq. 6): the margin over z₁ - z₃, free of scale and shift."""
    if logits.shape[1] < 3:
        raise BastionError(f"loss 'dlr' needs at least 3 classes, the model has {logits.shape[1]}; use 'margin'")
    ranked = logits.topk(3, dim=1).values
    return margin(logits, y) / (ranked[:, 0] - ranked[:, 2] + 1e-12)


LOSSES: dict[LossName, Loss] = {"ce": ce, "margin": margin, "dlr": dlr}


def misclassified(logits: Tensor, y: Tensor) -> Tensor:
    """(B,) bool: the model does not give the right class. A model that answers NaN has not given it."""
    return (logits.argmax(1) != hard(y)) | logits.isnan().any(1)

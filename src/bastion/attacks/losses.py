"""Losses that attacks maximise: one value per example, from logits and labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bastion import journal
from bastion.errors import BastionError
from bastion.forward import Loss
from bastion.types import hard

TargetedLoss = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits, y, and the class to reach (B,) -> (B,)
LossName = Literal["ce", "margin", "dlr"]
FLOOR = -1e9  # replaces the -inf of a masked class, which would make the denominator of DLR infinite


def ce(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy, hard or soft labels."""
    return F.cross_entropy(logits, y, reduction="none")


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """Largest wrong logit minus the right one: positive when fooled, zero on a tie."""
    labels = hard(y)[:, None]
    others = logits.scatter(1, labels, -torch.inf)
    return others.amax(1) - logits.gather(1, labels)[:, 0]


def dlr(logits: Tensor, y: Tensor) -> Tensor:
    """Difference of logits ratio (Croce and Hein 2020, Eq. 6): the margin over z₁ - z₃, free of scale and shift."""
    if logits.shape[1] < 3:
        raise BastionError(f"loss 'dlr' needs at least 3 classes, the model has {logits.shape[1]}; use 'margin'")
    ranked = logits.clamp(min=FLOOR).topk(3, dim=1).values
    return margin(logits, y) / (ranked[:, 0] - ranked[:, 2] + 1e-12)


def divergence(clean: Tensor, logits: Tensor) -> Tensor:
    """KL(p ‖ q) from the clean image's distribution p, given as log-probabilities, to that of these logits."""
    return (clean.exp() * (clean - logits.log_softmax(1))).sum(1)


def targeted_ce(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """Minus the cross-entropy of the target class."""
    return -F.cross_entropy(logits, target, reduction="none")


def targeted_margin(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """The target's logit minus the right one."""
    return (logits.gather(1, target[:, None]) - logits.gather(1, hard(y)[:, None]))[:, 0]


def targeted_dlr(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """Targeted DLR (Croce and Hein 2020, Eq. 7): the targeted margin over z₁ - (z₃ + z₄) / 2."""
    if logits.shape[1] < 4:
        raise BastionError(f"targeted 'dlr' needs at least 4 classes, the model has {logits.shape[1]}; use 'margin'")
    ranked = logits.clamp(min=FLOOR).topk(4, dim=1).values
    return targeted_margin(logits, y, target) / (ranked[:, 0] - (ranked[:, 2] + ranked[:, 3]) / 2 + 1e-12)


LOSSES: dict[LossName, Loss] = {"ce": ce, "margin": margin, "dlr": dlr}
TARGETED: dict[LossName, TargetedLoss] = {"ce": targeted_ce, "margin": targeted_margin, "dlr": targeted_dlr}


def usable_loss(loss: LossName, classes: int, *, targeted: bool) -> LossName:
    """The loss itself, or the margin if there are too few classes for DLR, which is noted in the journal."""
    if loss != "dlr":
        return loss
    few = classes < (4 if targeted else 3)
    journal.note("few-classes", None if few else ())
    return "margin" if few else loss


def likeliest_wrong(logits: Tensor, y: Tensor, count: int) -> Tensor:
    """(B, count) the wrong classes with the largest logits, likeliest first; fewer if there are fewer."""
    others = logits.nan_to_num(nan=-torch.inf).clamp(min=torch.finfo(logits.dtype).min)  # above that of the right class
    others = others.scatter(1, hard(y)[:, None], -torch.inf)
    return others.topk(min(count, logits.shape[1] - 1), dim=1).indices

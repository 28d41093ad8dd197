"""Attacks propose; here it is judged what they achieved."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from bastion.attacks.losses import margin, misclassified
from bastion.attacks.threat import Threat
from bastion.types import Attack, Batch


class Verdict(NamedTuple):
    x: Tensor  # what the attack returned; the image itself where the clean one was wrong already
    clean: Tensor  # bool (B,): right on the clean image
    inside: Tensor  # bool (B,): x is a point of the threat's set
    fooled: Tensor  # bool (B,): right before, wrong on x, and x inside
    prediction: Tensor  # int64 (B,): on x


def judge(model: nn.Module, batch: Batch, attack: Attack, threat: Threat, *, seed: int) -> Verdict:
    """Attack the examples that are right, and test what came back. Put the model in eval mode first."""
    clean = ~_wrong(model, batch.x, batch.y)[0]
    x = batch.x.clone()
    if clean.any():
        x[clean] = attack(model, batch.select(clean), threat, seed=seed).to(x.dtype)
    inside = threat.contains(batch.x, x)
    wrong, prediction = _wrong(model, x, batch.y)
    return Verdict(x, clean, inside, clean & inside & wrong, prediction)


def standing(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Which examples are still right, and how far from it the nearest wrong class is: negative while they are."""
    with torch.no_grad():
        logits = model(x.clone())  # which may normalise in place
    return ~misclassified(logits, y), margin(logits, y).nan_to_num(nan=torch.inf)


def _wrong(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        logits = model(x.clone())
    return misclassified(logits, y), logits.argmax(1)

"""Attacks propose; here it is judged what they achieved."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from bastion.attacks.asking import answer, ready
from bastion.attacks.losses import margin, misclassified
from bastion.attacks.threat import Threat
from bastion.errors import BastionError
from bastion.types import Attack, Batch


class Verdict(NamedTuple):
    x: Tensor  # what the attack returned; the image itself where the clean one was wrong already
    clean: Tensor  # bool (B,): right on the clean image
    inside: Tensor  # bool (B,): x is a point of the threat's set
    fooled: Tensor  # bool (B,): right before, wrong on x, and x inside
    prediction: Tensor  # int64 (B,): on x
    before: Tensor  # int64 (B,): on the clean image


def judge(model: nn.Module, batch: Batch, attack: Attack, threat: Threat, *, seed: int) -> Verdict:
    """Attack the examples that are right, and test what came back. Put the model in eval mode first."""
    batch = ready(model, batch, "judge")
    clean, _, before = standing(model, batch)
    x = batch.x.clone()
    if clean.any():
        x[clean] = proposed(model, batch.select(clean), attack, threat, seed=seed)
    inside = threat.contains(batch.x, x)
    after = standing(model, batch.at(x))
    return Verdict(x, clean, inside, clean & inside & ~after.right, after.prediction, before)


def proposed(model: nn.Module, batch: Batch, attack: Attack, threat: Threat, *, seed: int) -> Tensor:
    """What the attack returns, in the images' precision. It gets images of its own, and leaves the model's mode."""
    modes = {part: part.training for part in model.modules()}
    x = attack(model, batch.at(batch.x.clone()), threat, seed=seed)
    for part, training in modes.items():
        part.training = training
    if not isinstance(x, Tensor) or x.shape != batch.x.shape:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise BastionError(
            f"attack {type(attack).__name__}: must return an image for each it was given, a tensor of shape "
            f"{tuple(batch.x.shape)}, got {got}"
        )
    return x.to(batch.x)


class Standing(NamedTuple):
    right: Tensor  # bool (B,)
    lead: Tensor  # (B,) of the nearest wrong class: negative while the model is right
    prediction: Tensor  # int64 (B,)


def standing(model: nn.Module, batch: Batch) -> Standing:
    """How the model stands at these points."""
    with torch.no_grad():
        logits = answer(model, batch)
    lead = margin(logits, batch.y).nan_to_num(nan=torch.inf)
    return Standing(~misclassified(logits, batch.y), lead, logits.argmax(1))

"""Decides whether images are adversarial, and by a margin above rounding; `judge` runs an attack and tests it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from bastion import forward, journal
from bastion.attacks.losses import margin
from bastion.errors import BastionError
from bastion.forward import MASKED, check_batch, in_mode, misclassified
from bastion.threat import Threat
from bastion.types import Attack, Batch, hard


def is_adversarial(threat: Threat, x0: Tensor, x: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """(B,) bool: x is inside the threat's set around x0, and misclassified."""
    adversarial = misclassified(logits, y)
    wrong = adversarial.nonzero()[:, 0]  # few in most steps of an attack, so distances are computed for these only
    if len(wrong):
        adversarial[wrong] = threat.contains(x0[wrong], x[wrong])
    return adversarial


def lead(logits: Tensor, y: Tensor) -> Tensor:
    """(B,): the margin of the likeliest wrong class, negative if the model is right; infinite for NaN logits."""
    return margin(logits, y).nan_to_num(nan=torch.inf)


def margin_is_significant(logits: Tensor, y: Tensor, least: float) -> Tensor:
    """(B,) bool: a wrong class leads by more than `least` times the largest logit."""
    leads = lead(logits, y)
    right = logits.gather(1, hard(y)[:, None])
    largest = torch.where(logits > right - MASKED, logits.abs(), 0).amax(1)
    return (leads > least * largest) | (leads == torch.inf)


class Verdict(NamedTuple):
    x: Tensor  # what the attack returned; the clean image if that was misclassified
    clean: Tensor  # bool (B,): the clean image is classified right
    inside: Tensor  # bool (B,): x is in the threat's set
    fooled: Tensor  # bool (B,): the clean image is classified right, and x is adversarial
    prediction: Tensor  # int64 (B,): class of x
    before: Tensor  # int64 (B,): class of the clean image


def judge(model: nn.Module, batch: Batch, attack: Attack, threat: Threat, *, seed: int) -> Verdict:
    """Attack the images that are classified right, and test the result on the model as given, which is in eval mode."""
    given, batch = check_batch(model, batch, "judge")
    with torch.no_grad():
        before = forward.logits(given, batch.x, batch.y)
    clean, x = ~misclassified(before, batch.y), batch.x.clone()
    if clean.any():
        x[clean] = run_attack(attack, model, batch._replace(logits=before).select(clean), threat, seed=seed)
    with torch.no_grad():
        after = forward.logits(given, x, batch.y)
    fooled = clean & is_adversarial(threat, batch.x, x, after, batch.y)
    return Verdict(x, clean, threat.contains(batch.x, x), fooled, after.argmax(1), before.argmax(1))


def run_attack(attack: Attack, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
    """The attack's images, in the precision of the batch. The attack gets a copy; the model's mode is restored."""
    with in_mode(model), journal.attacking(len(batch.x), attack.passes(threat.norm)):
        x = attack(model, batch._replace(x=batch.x.clone()), threat, seed=seed)
    if not isinstance(x, Tensor) or x.shape != batch.x.shape:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise BastionError(
            f"attack {type(attack).__name__}: must return an image for each it was given, a tensor of shape "
            f"{tuple(batch.x.shape)}, got {got}"
        )
    return x.to(batch.x)

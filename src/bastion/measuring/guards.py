"""Warns of what makes a robust accuracy worthless: a model that expects normalised images, and the sanity checks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bastion import forward, rng
from bastion.forward import device_of, in_mode, misclassified
from bastion.measuring.paired import mcnemar
from bastion.measuring.sanity import SanityWarning
from bastion.models.normalisations import NORMALISATIONS, Stats
from bastion.models.wrap import normalises
from bastion.probes.sanity import observe
from bastion.types import Batch

CHECKED = 128  # images at most, of which the model may get more right if they are normalised
AT_ONCE = 32
SURE, UNSURE = 0.001, 0.1  # p-values: warn below the one, look at further images below the other
OBSERVED = 8  # images whose logits and gradients are looked at: no more than attacks run at once


def warn_of(found: Iterable[SanityWarning]) -> None:
    """Give these to Python's warnings, as of the line that called the caller."""
    for each in found:
        warnings.warn(f"{each.code} ({each.count} of {each.n} images): {each.meaning}", stacklevel=3)


def first_symptoms(model: nn.Module, images: Batch) -> dict[str, Tensor]:
    """Return columns `warning.CODE` of the first images: symptoms that show without an attack."""
    batch = images.select(torch.arange(min(OBSERVED, len(images.x)))).to(device_of(model))
    with in_mode(model, training=False), rng.preserved():
        return {f"warning.{code}": column for code, column in observe(model, batch, forwards=2).symptoms.items()}


def warn_if_normalised_input_is_expected(model: nn.Module, images: Batch) -> None:
    """Warn if the model is timm's with timm's classes, or is right on more of the images when they are normalised."""
    if images.x.shape[1] != 3 or normalises(model):
        return
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    usual = "imagenet" if config or images.x.shape[2] > 64 else "cifar10"
    stats: Stats = (tuple(config["mean"]), tuple(config["std"])) if "mean" in config else NORMALISATIONS[usual]
    if "mean" in config and config.get("num_classes") == getattr(model, "num_classes", None):
        seems = f"timm's {type(model).__name__} expects normalised images"
    else:
        before, after, y = _right_before_and_after(model, images, stats)
        gained, lost = _changed(before, after)
        # A network that predicts one class for everything is right on all images of that class.
        if gained <= lost or mcnemar(lost, gained) >= SURE or len({*y[after].tolist()}) == 1:
            return
        seems = (
            f"of {len(y)} images the model gets {int(before.sum())} right, and {int(after.sum())} if they are "
            "normalised: it seems to expect normalised images"
        )
    given = next((f"normalize='{name}'" for name, each in NORMALISATIONS.items() if each == stats), None)
    warnings.warn(
        f"{seems}. Use bastion.wrap(network, {given or f'mean={stats[0]}, std={stats[1]}'}), which `path.py:function` "
        "may return too, or give it the mean and std that it was trained with",
        stacklevel=3,
    )


def _right_before_and_after(model: nn.Module, images: Batch, stats: Stats) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the model gets right, without and with normalisation, and the labels; of as few images as will do."""
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in stats)
    found = torch.zeros(2, 0, dtype=torch.bool)
    for start in range(0, min(CHECKED, len(images.x)), AT_ONCE):
        x, y = images.x[start : start + AT_ONCE], images.y[start : start + AT_ONCE]
        right = [_right(model, each, y) for each in (x, (x - mean.to(x)) / std.to(x))]
        found = torch.cat([found, torch.stack(right)], 1)
        gained, lost = _changed(*found)
        if gained <= lost or not SURE <= mcnemar(lost, gained) < UNSURE:
            break
    return found[0], found[1], images.y[: found.shape[1]].cpu()


def _right(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    device = device_of(model)
    with torch.no_grad(), in_mode(model, training=False), rng.preserved():
        return ~misclassified(forward.logits(model, x.to(device), y.to(device)), y.to(device)).cpu()


def _changed(before: Tensor, after: Tensor) -> tuple[int, int]:
    """Return how many images are right after only, and how many before only."""
    return int((after & ~before).sum()), int((before & ~after).sum())

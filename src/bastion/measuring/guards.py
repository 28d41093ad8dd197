"""Warns early of the most common mistake with a model of one's own: it expects normalised images."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from bastion import forward, rng
from bastion.forward import device_of, in_mode, misclassified
from bastion.models.normalisations import NORMALISATIONS
from bastion.models.wrap import normalises
from bastion.types import Batch

CHECKED = 32  # images
GAINED = 8  # of them, and none lost: the chance of that is 1 in 256


def warn_if_normalised_input_is_expected(model: nn.Module, images: Batch) -> None:
    """Warn if the network is right on more of the first images when they are normalised, and on no fewer."""
    if len(images.x) < GAINED or images.x.shape[1] != 3 or normalises(model):
        return
    batch = images.select(torch.arange(min(CHECKED, len(images.x)))).to(device_of(model))
    usual = "imagenet" if batch.x.shape[2] > 64 else "cifar10"
    mean, std = (torch.tensor(each).view(3, 1, 1).to(batch.x) for each in NORMALISATIONS[usual])

    def right(x: Tensor) -> Tensor:
        return ~misclassified(forward.logits(model, x, batch.y), batch.y)

    with torch.no_grad(), in_mode(model, training=False), rng.preserved():
        before, after = right(batch.x), right((batch.x - mean) / std)
    gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
    # A network that predicts one class for everything is right on all images of that class.
    if gained >= GAINED and not lost and len({*batch.y[after].tolist()}) > 1:
        warnings.warn(
            f"of {len(batch.x)} images the model gets {int(before.sum())} right, and {int(after.sum())} if they are "
            f"normalised: it seems to expect normalised images. Use bastion.wrap(network, normalize='{usual}'), "
            "which `path.py:function` may return too, or give it the mean and std that it was trained with",
            stacklevel=3,
        )

"""What people get wrong most often with a model of their own, told before hours are spent."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from bastion import forward, rng
from bastion.forward import device_of, in_mode, misclassified
from bastion.models import Classifier
from bastion.models.normalisations import NORMALISATIONS
from bastion.types import Split

LOOKED_AT = 32  # images
GAINED = 8  # of them, and none lost: by chance that is one case in 256


def warn_if_normalised_input_is_expected(model: nn.Module, split: Split) -> None:
    """A network that is better on normalised images, and worse on none, was trained with them."""
    batch = split.batch(range(min(LOOKED_AT, len(split)))).to(device_of(model))
    if isinstance(model, Classifier) or batch.x.shape[1] != 3:
        return
    usual = "imagenet" if batch.x.shape[2] > 64 else "cifar10"
    mean, std = (torch.tensor(each).view(3, 1, 1).to(batch.x) for each in NORMALISATIONS[usual])

    def right(x: Tensor) -> Tensor:
        return ~misclassified(forward.logits(model, x, batch.y), batch.y)

    with torch.no_grad(), in_mode(model, training=False), rng.preserved():
        before, after = right(batch.x), right((batch.x - mean) / std)
    gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
    # A network that answers the same for all images is right on all images of one class.
    if gained >= GAINED and not lost and len({*batch.y[after].tolist()}) > 1:
        warnings.warn(
            f"of {len(batch.x)} images the model gets {int(before.sum())} right, and {int(after.sum())} if they are "
            f"normalised: it seems to expect that. Measure bastion.wrap(model, normalize='{usual}'), or with the mean "
            "and std that it was trained with",
            stacklevel=2,
        )

"""The user's own network as a `Classifier`, which takes pixels in [0, 1], normalises them and returns logits.

model = bastion.wrap(network, normalize="imagenet")
model = bastion.wrap(network, mean=(0.49, 0.48, 0.45), std=(0.25, 0.24, 0.26))
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import nn

from bastion.errors import BastionError, did_you_mean
from bastion.forward import device_of, in_mode, known_mistake
from bastion.models.classifier import Backbone, Blocks, Classifier
from bastion.models.normalisations import NORMALISATIONS
from bastion.types import Attention

ANY_CHANNELS = ("none", "half")  # normalisations that are the same in every channel
SIZES = (32, 224, 28, 64, 96, 160, 256, 299, 384)  # image sizes tried in turn if the network does not declare one


def wrap(
    module: nn.Module,
    normalize: str | None = None,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    shape: tuple[int, int, int] | None = None,
    blocks: str | Sequence[str] = (),
    attention: Attention | None = None,
) -> Classifier:
    """The network with its normalisation: `mean` and `std`, or the name of one, such as `imagenet` (`none`: identity).

    `shape` is (C, H, W) of its images, needed where it cannot be found by trying. `blocks` names the modules that are
    its residual blocks, * for a number (`layers.*`), for probes that look at their outputs or Jacobians. `attention`
    says what their attention is between, if they have any: `tokens`, `windows`, `channels`, or `class` if only the
    class token attends; the objective `rspc` and probes of attention need it.
    """
    kinds = get_args(Attention)
    if attention is not None and attention not in kinds:
        raise BastionError(f"wrap: attention: unknown '{attention}'{did_you_mean(str(attention), kinds)}")
    if attention and not blocks:
        raise BastionError("wrap: attention: says what the blocks do; give blocks= too, such as blocks='blocks.*'")
    means, stds = _stats(mean, std, normalize)
    _check_stats(module, means)
    channels = (3, 1) if normalize in ANY_CHANNELS else (len(means),)
    found = shape or _shape(module, channels)
    if normalize in ANY_CHANNELS:
        means, stds = means[:1] * found[0], stds[:1] * found[0]
    try:
        outputs = _run(module, found)
    except _WrongPrecision:
        raise
    except Exception as error:
        raise BastionError(
            f"wrap: {type(module).__name__} does not take images of {found} ({error}); give shape=(C, H, W)"
        ) from error
    if not isinstance(outputs, torch.Tensor) or outputs.ndim != 2:
        raise BastionError(f"wrap: {type(module).__name__} must give logits (B, classes), got {type(outputs).__name__}")
    known = _known(module)
    if blocks:
        named = [blocks] if isinstance(blocks, str) else blocks
        known["blocks"] = tuple(Blocks(each, attention) for each in named)
    backbone = Backbone(module, outputs.shape[1], found, **known)
    return Classifier(backbone, means, stds).to(device_of(module)).train(module.training)


def _stats(
    mean: Sequence[float] | None, std: Sequence[float] | None, normalize: str | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if normalize is not None and mean is None and std is None:
        if normalize not in NORMALISATIONS:
            raise BastionError(f"wrap: unknown normalisation '{normalize}'{did_you_mean(normalize, NORMALISATIONS)}")
        return NORMALISATIONS[normalize]
    if mean is None or std is None or normalize is not None:
        raise BastionError(
            f"wrap: give mean and std, or normalize= one of {', '.join(NORMALISATIONS)}; `none` if the network "
            "normalises by itself"
        )
    try:
        return tuple(map(float, mean)), tuple(map(float, std))
    except TypeError as error:
        raise BastionError(
            f"wrap: mean and std need one number for each channel, such as (0.5, 0.5, 0.5), got {mean!r} and {std!r}"
        ) from error


def _check_stats(module: nn.Module, means: tuple[float, ...]) -> None:
    """Raise where images would be normalised wrongly or twice, which gives plausible numbers."""
    if max(means, default=0) > 1:
        raise BastionError(f"wrap: mean and std are of pixels in [0, 1], got a mean of {max(means):g}; divide by 255")
    if any(means) and normalises(module):
        raise BastionError("wrap: this model normalises its images already; use it as it is")


def normalises(module: nn.Module) -> bool:
    """Whether a mean is subtracted or a std divided by: `wrap` may have been given none."""
    own = [each for each in module.modules() if isinstance(each, Classifier)]
    return any(bool((each.mean != 0).any() or (each.std != 1).any()) for each in own)


def _shape(module: nn.Module, channels: Sequence[int]) -> tuple[int, int, int]:
    """The input size in timm's configuration of the network; else the first of `SIZES` that it runs on."""
    config: Any = getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None) or {}
    if size := config.get("input_size"):
        return (int(size[0]), int(size[1]), int(size[2]))
    for count, side in itertools.product(channels, SIZES):
        try:
            _run(module, (count, side, side))
            return count, side, side
        except _WrongPrecision:
            raise
        except Exception:  # a user's network may raise anything on images of another size
            continue
    raise BastionError(
        f"wrap: the size of the images of {type(module).__name__} could not be found; give shape=(C, H, W)"
    )


def _known(module: nn.Module) -> dict[str, Any]:
    """Paper and residual blocks, if it is one of timm's networks."""
    from bastion.models.timm import family_of

    config: Any = getattr(module, "pretrained_cfg", None) or {}
    return family_of(str(config.get("architecture", "")))._asdict()


class _WrongPrecision(BastionError):
    """Images of another size would not help."""


def _run(module: nn.Module, shape: tuple[int, int, int]) -> Any:
    images = torch.zeros(1, *shape, device=device_of(module))
    with torch.no_grad(), in_mode(module, training=False):
        try:
            return module(images)
        except RuntimeError as error:
            if known := known_mistake(str(error), module, images):
                raise _WrongPrecision(f"wrap: {known}; torch says: {error}") from error
            raise

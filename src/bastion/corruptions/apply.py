"""Corrupt a batch of images, each independently of the others in the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bastion.corruptions import blur, digital, noise, weather
from bastion.corruptions.draws import Draws
from bastion.corruptions.frost import drawn, frost, photographs
from bastion.corruptions.parameters import NAMES, SEVERITIES, ParameterSet, for_size, lookup
from bastion.corruptions.spatter import spatter
from bastion.errors import BastionError, did_you_mean

VERSION = 1  # raised when the same settings give other images: stored facts are then measured again
SMALLEST = 8  # smallest side of an image, in pixels
_AT_ONCE = 1 << 17  # values processed at once: more do not fit into the processor's cache
_EIGHT_BITS = ("pixelate", "jpeg_compression")  # already rounded to 8 bits, as by Pillow
_JPEG85 = 85  # quality of the published ImageNet-C files

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "frost": frost,
    "fog": weather.fog,
    "brightness": weather.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": digital.jpeg_compression,
    "speckle_noise": noise.speckle_noise,
    "gaussian_blur": blur.gaussian_blur,
    "spatter": spatter,
    "saturate": digital.saturate,
    "frost_proc": frost,
}


def corrupt(
    x: Tensor,
    name: str,
    severity: int,
    *,
    index: Tensor,
    seed: int = 0,
    parameters: ParameterSet | None = None,
    truncate: bool = True,
    jpeg85: bool = False,
    textures: str | Path | None = None,
) -> Tensor:
    """Images (B, C, H, W) in [0, 1] with a common corruption (Hendrycks and Dietterich 2019), of the same shape.

    Random numbers depend only on seed, name, severity and the example's `index` (B,). `parameters` None: chosen by the
    image size. `truncate` truncates to 8 bits, as in the published data sets; without it most corruptions are
    differentiable. `jpeg85` compresses the result as JPEG of quality 85, as in ImageNet-C. `textures` is the folder of
    the photographs that `frost` needs.
    """
    check_name(name, severity)
    check_images(x, index, "corrupt")
    values = lookup(parameters or for_size(*x.shape[-2:]), name, severity)
    if name in ("frost", "frost_proc"):
        values = (photographs(textures) if name == "frost" else drawn(), *values)
    step, corrupted, images = max(1, _AT_ONCE // max(1, x[:1].numel())), torch.empty_like(x), at_least_float32(x)
    for start in range(0, len(x), step):
        draws = Draws(index[start : start + step], seed, f"{name}/{severity}")
        made = _FUNCTIONS[name](images[start : start + step], draws, *values)
        if name not in _EIGHT_BITS:
            made = made.clamp(0, 1)
            made = eight_bits(made, rounded=name == "motion_blur") if truncate else made
        corrupted[start : start + step] = digital.jpeg(made, _JPEG85) if jpeg85 else made
    return corrupted


def at_least_float32(x: Tensor) -> Tensor:
    """The images in float32 if in half precision, which holds neither 8-bit levels nor positions of pixels."""
    return x.float() if x.element_size() < 4 else x


def eight_bits(x: Tensor, *, rounded: bool) -> Tensor:
    """Truncated to 8 bits, as by numpy.uint8, or `rounded`, as by ImageMagick, which made the motion blur."""
    # 2^-10 keeps values that are below a level only by float32 rounding at that level.
    return (x * 255).add_(0.5 if rounded else 2.0**-10).floor_().div_(255)


def check_name(name: str, severity: int) -> None:
    if name not in NAMES:
        raise BastionError(f"unknown corruption '{name}'{did_you_mean(name, NAMES)}")
    if severity not in SEVERITIES or isinstance(severity, bool):
        raise BastionError(f"{name}: severity must be 1, 2, 3, 4 or 5, got {severity!r}")


def check_images(x: Tensor, index: Tensor, where: str) -> None:
    if x.ndim != 4 or not x.is_floating_point() or x.shape[1] not in (1, 3):
        raise BastionError(
            f"{where}: images must be floating-point numbers in [0, 1] of shape (B, 1 or 3, H, W), got {x.dtype} "
            f"{tuple(x.shape)}; divide uint8 images by 255"
        )
    if min(x.shape[-2:]) < SMALLEST:
        raise BastionError(
            f"{where}: images must be at least {SMALLEST} x {SMALLEST} pixels, got {x.shape[2]} x {x.shape[3]}"
        )
    if index.shape != x.shape[:1] or index.is_floating_point():
        raise BastionError(
            f"{where}: index must be the examples' numbers, {len(x)} integers, got {index.dtype} {tuple(index.shape)}"
        )
    if len(x):
        low, high = x.detach().aminmax()
        if not (low >= 0 and high <= 1):  # false for NaN too
            raise BastionError(f"{where}: pixels must be in [0, 1], got {low:.4g} to {high:.4g}")

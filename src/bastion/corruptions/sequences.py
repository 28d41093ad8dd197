"""Perturbation sequences of ImageNet-P and CIFAR-10-P (Hendrycks and Dietterich 2019): frames of a gradual change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from bastion.corruptions import noise, warp
from bastion.corruptions.apply import at_least_float32, check_images, eight_bits
from bastion.corruptions.blur import move
from bastion.corruptions.draws import Draws
from bastion.corruptions.filters import enlarge, gaussian
from bastion.corruptions.parameters import ParameterSet, for_size
from bastion.corruptions.spatter import splashed
from bastion.corruptions.weather import brightness, snow_layer, snowed
from bastion.errors import BastionError, did_you_mean

PerturbationName = Literal[
    "gaussian_noise",
    "shot_noise",
    "motion_blur",
    "zoom_blur",
    "snow",
    "brightness",
    "translate",
    "rotate",
    "tilt",
    "scale",
    # for tuning, not in mFR; but `spatter` is one of the ten of CIFAR-10-P, instead of `snow`
    "speckle_noise",
    "gaussian_blur",
    "spatter",
    "shear",
]
PERTURBATIONS: tuple[str, ...] = get_args(PerturbationName)
LENGTH = 31  # frames of a sequence, except `translate`, and `motion_blur` of CIFAR-10-P
_ROUNDED = ("motion_blur", "tilt")  # rounded to 8 bits, as by ImageMagick and OpenCV; the others are truncated


def _steps(first: float, step: float, count: int = LENGTH) -> tuple[float, ...]:
    return tuple(round(first + step * number, 6) for number in range(count))


# Arguments of each generator after the images and the random numbers.
_IMAGENET: Mapping[str, tuple[Any, ...]] = {
    "gaussian_noise": (noise.gaussian_noise, 0.03),
    "shot_noise": (noise.shot_noise, 300),
    "motion_blur": (_steps(-120, 4), 10, 3.0),
    "zoom_blur": (_steps(1.0, 0.004),),
    "snow": (_steps(-150, 4), 0.05, 0.3, 3, 0.5, 14, 4.0, 0.85),
    "brightness": (_steps(-0.3, 0.02),),
    "translate": (range(-20, 21),),
    "rotate": ("angle", _steps(-15, 1)),
    "tilt": (_steps(-15, 1),),
    "scale": ("scale", _steps(0.4, 0.025)),
    "speckle_noise": (noise.speckle_noise, 0.05),
    "gaussian_blur": (_steps(0.25, 0.035), 6.0),
    "spatter": (0.65, 0.27, 3.7, 0.69, 0.6, (0.05, 0.1, 0.15, 0.7)),
    "shear": ("shear", _steps(-15, 1)),
}
_CIFAR: Mapping[str, tuple[Any, ...]] = {
    "gaussian_noise": (noise.gaussian_noise, 0.02),
    "shot_noise": (noise.shot_noise, 700),
    "motion_blur": (_steps(-180, 9, 21), 6, 1.8),
    "zoom_blur": (_steps(1.0, 0.004),),
    "snow": (_steps(-150, 4), 0.05, 0.3, 2, 0.5, 10, 2.0, 0.85),
    "brightness": (_steps(-0.225, 0.015),),
    "translate": (range(-7, 9),),
    "rotate": ("angle", _steps(-15, 1)),
    "tilt": (_steps(-11.25, 0.75),),
    "scale": ("scale", _steps(0.7, 0.02)),
    "speckle_noise": (noise.speckle_noise, 0.05),
    "gaussian_blur": (_steps(0.3, 0.015), 7.0),
    "spatter": (0.6, 0.265, 1.75, 0.7, 0.6, (0.2, 0.8)),
    "shear": ("shear", _steps(-15, 1)),
}
_PARAMETERS: Mapping[ParameterSet, Mapping[str, tuple[Any, ...]]] = {"cifar": _CIFAR, "imagenet": _IMAGENET}


def frames(
    x: Tensor, name: str, *, index: Tensor, seed: int = 0, parameters: ParameterSet | None = None
) -> Iterator[Tensor]:
    """The frames of a perturbation sequence of images (B, C, H, W) in [0, 1], one (B, C, H, W) after the other.

    Random numbers depend only on seed, name and the example's `index` (B,). `parameters` None: chosen by the image
    size, as in `corrupt`. Frames are rounded or truncated to 8 bits.
    """
    if name not in PERTURBATIONS:
        raise BastionError(f"unknown perturbation '{name}'{did_you_mean(name, PERTURBATIONS)}")
    if parameters not in (None, *_PARAMETERS):
        raise BastionError(f"parameters: expected one of {', '.join(get_args(ParameterSet))}, got '{parameters}'")
    check_images(x, index, "frames")
    values = _PARAMETERS[parameters or for_size(*x.shape[-2:])][name]
    made = _GENERATORS[name](at_least_float32(x.detach()), Draws(index, seed, f"{name}/sequence"), *values)
    return (eight_bits(frame.clamp(0, 1), rounded=name in _ROUNDED).to(x.dtype) for frame in made)


def compares_with_first(name: str) -> bool:
    """Frames of noise are not a sequence in time, so each is compared with the clean image."""
    return "noise" in name


def _noise(x: Tensor, draws: Draws, add: Callable[[Tensor, Draws, float], Tensor], strength: float) -> Iterator[Tensor]:
    """The clean image, then the image with new noise of the same strength in each frame."""
    yield x
    for number in range(1, LENGTH):
        yield add(x, Draws(draws.index, draws.seed, f"{draws.name}/{number}"), strength)


def _motion_blur(x: Tensor, draws: Draws, angles: Sequence[float], radius: int, sigma: float) -> Iterator[Tensor]:
    for angle in angles:
        yield move(x, torch.full((len(x),), angle), radius, sigma)


def _zoom_blur(x: Tensor, draws: Draws, scales: Sequence[float]) -> Iterator[Tensor]:
    """The mean of all enlargements so far, the first of which is the image itself."""
    total = torch.zeros_like(x)
    for number, scale in enumerate(scales, start=1):
        total = total + eight_bits(warp.affine(x, scale=scale), rounded=False)
        yield total / number


def _snow(
    x: Tensor,
    draws: Draws,
    angles: Sequence[float],
    mean: float,
    std: float,
    zoom: float,
    threshold: float,
    radius: int,
    sigma: float,
    mix: float,
) -> Iterator[Tensor]:
    """The same flakes in all frames, each frame with another direction of fall."""
    layer = enlarge(mean + std * draws.normal("flakes", (1, *x.shape[-2:])), zoom)
    for angle in angles:
        yield snowed(x, snow_layer(layer, threshold, torch.full((len(x),), angle), radius, sigma), mix)


def _brightness(x: Tensor, draws: Draws, amounts: Sequence[float]) -> Iterator[Tensor]:
    for amount in amounts:
        yield brightness(x, draws, amount)


def _translate(x: Tensor, draws: Draws, shifts: Sequence[int]) -> Iterator[Tensor]:
    for pixels in shifts:
        yield warp.translate(x, pixels)


def _affine(x: Tensor, draws: Draws, what: str, values: Sequence[float]) -> Iterator[Tensor]:
    for value in values:
        yield warp.affine(x, **{what: value})


def _tilt(x: Tensor, draws: Draws, angles: Sequence[float]) -> Iterator[Tensor]:
    for angle in angles:
        yield warp.tilt(x, angle)


def _gaussian_blur(x: Tensor, draws: Draws, sigmas: Sequence[float], truncate: float) -> Iterator[Tensor]:
    for sigma in sigmas:
        yield gaussian(x, sigma, truncate=truncate)


def _spatter(
    x: Tensor,
    draws: Draws,
    mean: float,
    std: float,
    blur: float,
    threshold: float,
    strength: float,
    drip: Sequence[float],
) -> Iterator[Tensor]:
    """Drops of water that run down a little in each frame."""
    liquid = gaussian(mean + std * draws.normal("liquid", (1, *x.shape[-2:])), blur)
    liquid = torch.where(liquid < threshold, torch.zeros_like(liquid), liquid)
    for _ in range(LENGTH):
        yield splashed(x, liquid.to(x.dtype), strength)
        liquid = dripped(liquid, drip)


def dripped(liquid: Tensor, weights: Sequence[float]) -> Tensor:
    """Each column convolved with the weights, as by numpy.convolve in mode `same`, which moves the liquid down."""
    height, below = liquid.shape[-2], (len(weights) - 1) // 2
    padded = F.pad(liquid, (0, 0, len(weights) - 1 - below, below))
    total = torch.zeros_like(liquid)
    for number, weight in enumerate(reversed(weights)):
        total = total.add_(padded[..., number : number + height, :], alpha=weight)
    return total


_GENERATORS: Mapping[str, Callable[..., Iterator[Tensor]]] = {
    "gaussian_noise": _noise,
    "shot_noise": _noise,
    "motion_blur": _motion_blur,
    "zoom_blur": _zoom_blur,
    "snow": _snow,
    "brightness": _brightness,
    "translate": _translate,
    "rotate": _affine,
    "tilt": _tilt,
    "scale": _affine,
    "speckle_noise": _noise,
    "gaussian_blur": _gaussian_blur,
    "spatter": _spatter,
    "shear": _affine,
}

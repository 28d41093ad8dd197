"""Parameters of each corruption at severities 1 to 5: the published ImageNet-C and CIFAR-10-C settings.

Hendrycks and Dietterich 2019, Benchmarking neural network robustness to common corruptions and perturbations. Values
are the arguments of each corruption's function after the images and the random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from bastion.errors import BastionError

ParameterSet = Literal["cifar", "imagenet"]
COMMON = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")  # for tuning; no part of mCE
PROCEDURAL = ("frost_proc",)  # bastion's own; no part of mCE
NAMES = (*COMMON, *EXTRA, *PROCEDURAL)
SEVERITIES = (1, 2, 3, 4, 5)
LARGEST_CIFAR = 64  # pixels

_FROST_IMAGENET = ((1.0, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))
_FROST_CIFAR = ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))


def _zooms(step: float, *counts: int) -> tuple[tuple[float, int], ...]:
    return tuple((step, count) for count in counts)


_IMAGENET: Mapping[str, tuple[Any, ...]] = {
    "gaussian_noise": (0.08, 0.12, 0.18, 0.26, 0.38),
    "shot_noise": (60, 25, 12, 5, 3),
    "impulse_noise": (0.03, 0.06, 0.09, 0.17, 0.27),
    "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    # Counts as given by numpy.arange in the published code, which by rounding sometimes includes the end.
    "zoom_blur": (*_zooms(0.01, 12, 16), *_zooms(0.02, 11, 13), *_zooms(0.03, 11)),
    "snow": (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    "frost": tuple((*weights, 1) for weights in _FROST_IMAGENET),
    "frost_proc": tuple((*weights, 1) for weights in _FROST_IMAGENET),
    "fog": ((1.5, 2), (2.0, 2), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4)),
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
    # For a side of 244, not 224: a mistake in the published code, and so part of the data set.
    "elastic_transform": (
        (488.0, 170.8, 24.4),
        (488.0, 19.52, 48.8),
        (12.2, 2.44, 4.88),
        (17.08, 2.44, 4.88),
        (29.28, 2.44, 4.88),
    ),
    "pixelate": (0.6, 0.5, 0.4, 0.3, 0.25),
    "jpeg_compression": (25, 18, 15, 10, 7),
    "speckle_noise": (0.15, 0.2, 0.35, 0.45, 0.6),
    "gaussian_blur": (1, 2, 3, 4, 6),
    "spatter": (
        (0.65, 0.3, 4, 0.69, 0.6, False),
        (0.65, 0.3, 3, 0.68, 0.6, False),
        (0.65, 0.3, 2, 0.68, 0.5, False),
        (0.65, 0.3, 1, 0.65, 1.5, True),
        (0.67, 0.4, 1, 0.65, 1.5, True),
    ),
    "saturate": ((0.3, 0.0), (0.1, 0.0), (2.0, 0.0), (5.0, 0.1), (20.0, 0.2)),
}

_CIFAR: Mapping[str, tuple[Any, ...]] = {
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": (500, 250, 100, 75, 50),
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "zoom_blur": _zooms(0.01, 7, 12, 16, 21, 26),
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": tuple((*weights, 5) for weights in _FROST_CIFAR),
    "frost_proc": tuple((*weights, 5) for weights in _FROST_CIFAR),
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1.0, 2), (1.5, 1.75)),
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "elastic_transform": ((0.0, 0.0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)),
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
    "jpeg_compression": (80, 65, 58, 50, 40),
    "speckle_noise": (0.06, 0.1, 0.12, 0.16, 0.2),
    "gaussian_blur": (0.4, 0.6, 0.7, 0.8, 1),
    "spatter": (
        (0.62, 0.1, 0.7, 0.7, 0.5, False),
        (0.65, 0.1, 0.8, 0.7, 0.5, False),
        (0.65, 0.3, 1, 0.69, 0.5, False),
        (0.65, 0.1, 0.7, 0.69, 0.6, True),
        (0.65, 0.1, 0.5, 0.68, 0.6, True),
    ),
    "saturate": ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2)),
}

PARAMETERS: Mapping[ParameterSet, Mapping[str, tuple[Any, ...]]] = {"cifar": _CIFAR, "imagenet": _IMAGENET}


def for_size(height: int, width: int) -> ParameterSet:
    """`cifar` for images of up to 64 x 64, `imagenet` for larger ones.

    The published parameters are for 32 x 32 and 224 x 224; those of Tiny-ImageNet-C (64 x 64) are much closer to
    CIFAR's, and radii for 224 pixels would destroy a small image.
    """
    return "cifar" if max(height, width) <= LARGEST_CIFAR else "imagenet"


def lookup(parameters: ParameterSet, name: str, severity: int) -> tuple[Any, ...]:
    """The arguments of a corruption's function at this severity."""
    if parameters not in PARAMETERS:
        raise BastionError(f"parameters: expected one of {', '.join(get_args(ParameterSet))}, got '{parameters}'")
    value = PARAMETERS[parameters][name][severity - 1]
    return value if isinstance(value, tuple) else (value,)

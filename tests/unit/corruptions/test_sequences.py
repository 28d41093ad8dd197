"""Perturbation sequences: frames and parameters of ImageNet-P and CIFAR-10-P, against Pillow, OpenCV and numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from bastion.corruptions import PERTURBATIONS, ParameterSet, frames, warp
from bastion.corruptions.sequences import dripped
from bastion.errors import BastionError

SETS: tuple[ParameterSet, ...] = ("cifar", "imagenet")
FRAMES = {("imagenet", "translate"): 41, ("cifar", "translate"): 16, ("cifar", "motion_blur"): 21}  # all others have 31
# The frames that are the image itself. Snow, spatter and blurs have none; tilt shrinks the image even at 0 degrees.
CLEAN = {
    **{
        name: {"cifar": [0], "imagenet": [0]} for name in ("gaussian_noise", "shot_noise", "speckle_noise", "zoom_blur")
    },
    **{name: {"cifar": [15], "imagenet": [15]} for name in ("brightness", "rotate", "shear")},
    "translate": {"cifar": [7], "imagenet": [20]},
    "scale": {"cifar": [15], "imagenet": [24]},
}


def pictures(count: int, height: int = 32, width: int = 32, channels: int = 3) -> Tensor:
    """Smooth colours with 8 bits, brighter than black so that the outside is seen."""
    coarse = torch.rand(count, channels, 6, 6, generator=torch.Generator().manual_seed(0))
    smooth = F.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0.2, 0.8)
    return (smooth * 255).round() / 255


def sequence(x: Tensor, name: str, parameters: ParameterSet = "cifar", seed: int = 0) -> Tensor:
    """(T, B, C, H, W)."""
    return torch.stack(list(frames(x, name, index=torch.arange(len(x)), seed=seed, parameters=parameters)))


def levels(x: Tensor) -> np.ndarray:
    return np.asarray((x * 255).round().to(torch.uint8).movedim(-3, -1))


@pytest.mark.parametrize("name", PERTURBATIONS)
@pytest.mark.parametrize("parameters", SETS)
def test_sequences_are_as_long_as_published_and_clean_where_they_should_be(parameters: ParameterSet, name: str) -> None:
    side = {"cifar": 32, "imagenet": 96}[parameters]
    x = pictures(1, side, side)
    made = sequence(x, name, parameters)
    assert len(made) == FRAMES.get((parameters, name), 31)
    clean = [number for number, frame in enumerate(made) if torch.equal(frame, x)]
    assert clean == CLEAN.get(name, {}).get(parameters, [])


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_an_image_alone_has_the_frames_that_it_has_in_company(name: str) -> None:
    x, index = pictures(2), torch.tensor([7, 1000])
    together = torch.stack(list(frames(x, name, index=index)))
    alone = [torch.stack(list(frames(x[i : i + 1], name, index=index[i : i + 1]))) for i in range(2)]
    assert torch.equal(together, torch.cat(alone, 1))


@pytest.mark.parametrize("name", PERTURBATIONS)
@pytest.mark.parametrize("shape", [(1, 40, 28), (3, 8, 8)])
def test_shape_and_range_stay_and_values_are_8_bit(name: str, shape: tuple[int, int, int]) -> None:
    x = pictures(2, *shape[1:], channels=shape[0])
    made = sequence(x, name)
    assert made.shape[1:] == x.shape and made.dtype == x.dtype
    assert (made * 255 - (made * 255).round()).abs().max() < 1e-4 and made.min() >= 0 and made.max() <= 1


def test_the_set_of_parameters_follows_the_size() -> None:
    assert len(list(frames(pictures(1, 64, 64), "translate", index=torch.zeros(1, dtype=torch.long)))) == 16
    assert len(list(frames(pictures(1, 65, 65), "translate", index=torch.zeros(1, dtype=torch.long)))) == 41


@pytest.mark.parametrize(("parameters", "sigma", "photons"), [("cifar", 0.02, 700), ("imagenet", 0.03, 300)])
def test_noise_has_the_moments_of_its_law_and_is_new_in_every_frame(
    parameters: ParameterSet, sigma: float, photons: int
) -> None:
    x = torch.full((4, 3, 32, 32), 100 / 255)
    cut = 0.5 / 255  # the mean of what is cut off to 8 bits; its variance is that of a uniform number
    for name, std in (
        ("gaussian_noise", sigma),
        ("shot_noise", math.sqrt(100 / 255 / photons)),
        ("speckle_noise", 0.05 * 100 / 255),
    ):
        added = sequence(x, name, parameters)[1:] - x
        assert added.mean().item() == pytest.approx(-cut, abs=5 * std / math.sqrt(added.numel()) + 1e-4)
        assert added.var().item() == pytest.approx(std**2 + 1 / (12 * 255**2), rel=0.02)
        flat = added.flatten(1)
        assert torch.corrcoef(flat[:8])[~torch.eye(8, dtype=torch.bool)].abs().max() < 0.05
        assert not torch.equal(added, sequence(x, name, parameters, seed=1)[1:] - x)


@pytest.mark.parametrize(("parameters", "step"), [("cifar", 0.015), ("imagenet", 0.02)])
def test_grey_gets_brighter_by_the_same_amount_in_every_frame(parameters: ParameterSet, step: float) -> None:
    made = sequence(torch.full((1, 3, 8, 8), 128 / 255), "brightness", parameters)
    wanted = [math.floor(128 + 255 * step * (number - 15) + 1e-6) for number in range(31)]
    assert levels(made)[:, 0, 0, 0, 0].tolist() == wanted


@pytest.mark.parametrize(("parameters", "first"), [("cifar", -7), ("imagenet", -20)])
def test_translate_moves_whole_pixels_to_the_right_over_black(parameters: ParameterSet, first: int) -> None:
    x = pictures(1)
    for pixels, frame in enumerate(sequence(x, "translate", parameters), start=first):
        kept = x[..., max(0, -pixels) : 32 - max(0, pixels)]
        assert torch.equal(frame[..., max(0, pixels) : 32 + min(0, pixels)], kept)
        assert frame.sum() == pytest.approx(kept.sum().item(), rel=1e-6)


@pytest.mark.parametrize("name", ["rotate", "scale", "shear"])
@pytest.mark.parametrize("parameters", SETS)
def test_affine_maps_are_those_of_pillow(parameters: ParameterSet, name: str) -> None:
    """torchvision's matrix: the inverse of a rotation, scaling and shear about (W / 2 + 1/2, H / 2 + 1/2)."""
    x = pictures(1, 32, 40)
    made = levels(sequence(x, name, parameters)[:, 0])
    for number in (0, 4, 11, 22, 30):
        scale = {"cifar": 0.7 + 0.02 * number, "imagenet": 0.4 + 0.025 * number}[parameters] if name == "scale" else 1.0
        a, s = (math.radians(number - 15) if name == kind else 0.0 for kind in ("rotate", "shear"))
        inverse = np.array([[math.cos(a + s), math.sin(a + s)], [-math.sin(a), math.cos(a)]]) / (scale * math.cos(s))
        centre = np.array([20.5, 16.5])
        matrix = np.concatenate([inverse, (centre - inverse @ centre)[:, None]], 1)
        wanted = Image.fromarray(levels(x[0])).transform(
            (40, 32), Image.Transform.AFFINE, matrix.flatten().tolist(), Image.Resampling.BILINEAR
        )
        apart = np.abs(made[number].astype(int) - np.asarray(wanted).astype(int))
        assert apart.max() <= 1 and (apart > 0).mean() < 0.02  # values on the edge of a level


def test_tilt_is_that_of_opencv() -> None:
    """By 10 degrees, with cv2.warpPerspective and the matrix of the published code."""
    x = (torch.arange(8)[:, None] * 13 + torch.arange(8) * 17 + 20).float() / 255
    wanted = [
        [26, 41, 57, 74, 91, 106, 121, 70],
        [37, 53, 70, 87, 104, 122, 141, 75],
        [49, 65, 82, 99, 117, 136, 155, 74],
        [61, 77, 95, 113, 131, 150, 170, 70],
        [73, 90, 108, 126, 145, 165, 185, 65],
        [82, 103, 122, 140, 160, 180, 201, 58],
        [89, 117, 136, 155, 175, 196, 217, 49],
        [62, 75, 74, 69, 61, 48, 31, 1],
    ]
    assert (warp.tilt(x[None, None], 10.0)[0, 0] * 255).round().int().tolist() == wanted


@pytest.mark.parametrize(("parameters", "step"), [("cifar", 0.75), ("imagenet", 1.0)])
def test_tilt_goes_through_its_angles_from_one_side_to_the_other(parameters: ParameterSet, step: float) -> None:
    x = pictures(1)
    made = sequence(x, "tilt", parameters)
    for number in (0, 15, 30):
        wanted = (warp.tilt(x, step * (number - 15)) * 255).round() / 255
        assert torch.allclose(made[number], wanted, atol=1e-6)


def test_zoom_blur_is_the_mean_of_all_enlargements_so_far() -> None:
    x = pictures(1)
    made, total = levels(sequence(x, "zoom_blur")[:, 0]), np.zeros((32, 32, 3))
    for number, frame in enumerate(made):
        scale = 1 + 0.004 * number
        shift = 16.5 * (1 - 1 / scale)
        matrix = (1 / scale, 0, shift, 0, 1 / scale, shift)
        image = Image.fromarray(levels(x[0]))
        total += np.asarray(image.transform((32, 32), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR))
        assert np.abs(frame - np.floor(total / (number + 1) + 1e-6)).max() <= 1


def test_motion_blur_ends_along_the_rows() -> None:
    """At 0 degrees, and at the 180 degrees that CIFAR-10-P starts with, stripes along the rows stay as they are."""
    stripes = torch.full((1, 3, 32, 32), 0.2)
    stripes[:, :, ::4] = 0.8
    stripes = (stripes * 255).round() / 255
    same = [bool(torch.equal(frame, stripes)) for frame in sequence(stripes, "motion_blur")]
    assert same == [True] + 19 * [False] + [True]
    assert [bool(torch.equal(frame, stripes)) for frame in sequence(stripes, "motion_blur", "imagenet")][-1]


@pytest.mark.parametrize("parameters", SETS)
def test_the_same_snow_falls_in_all_frames(parameters: ParameterSet) -> None:
    """On black: 0.075 from whitening, and flakes whose light moves but stays as much."""
    light = (sequence(torch.zeros(4, 3, 64, 64), "snow", parameters)).mean((2, 3, 4)) - math.floor(0.075 * 255) / 255
    assert light.min() > 0.005
    assert ((light - light.mean(0)).abs() / light.mean(0)).max() < 0.15  # flakes leave at the border


def test_gaussian_blur_takes_away_more_in_every_frame() -> None:
    made = sequence(pictures(1), "gaussian_blur", "imagenet")
    contrast = made.flatten(1).var(1)
    assert (contrast.diff() < 1e-5).all() and contrast[-1] < 0.97 * contrast[0]


@pytest.mark.parametrize("weights", [(0.2, 0.8), (0.05, 0.1, 0.15, 0.7)])
def test_water_runs_down_as_numpy_convolves(weights: tuple[float, ...]) -> None:
    liquid = torch.rand(2, 1, 12, 5, dtype=torch.float64)
    wanted = np.apply_along_axis(lambda column: np.convolve(column, weights, mode="same"), 2, liquid.numpy())
    assert np.allclose(dripped(liquid, weights).numpy(), wanted)


def test_wrong_names_are_refused_at_once() -> None:
    x, index = pictures(1), torch.zeros(1, dtype=torch.long)
    with pytest.raises(BastionError, match="unknown perturbation 'rotation'; did you mean 'rotate'"):
        frames(x, "rotation", index=index)
    with pytest.raises(BastionError, match="parameters: expected one of cifar, imagenet, got 'mnist'"):
        frames(x, "rotate", index=index, parameters="mnist")  # type: ignore[arg-type]
    with pytest.raises(BastionError, match=r"frames: pixels must be in \[0, 1\], got .* to 1\.6"):
        frames(2 * x, "rotate", index=index)

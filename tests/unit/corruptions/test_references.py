"""Against other code: tests/golden/corruptions.npz, which scripts/corruption_references.py makes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bastion.corruptions import blur, corrupt, digital, weather
from bastion.corruptions.draws import Draws
from bastion.corruptions.parameters import lookup
from bastion.corruptions.plasma import plasma
from bastion.corruptions.spatter import spatter

LEVEL = 1 / 255
FILE = Path(__file__).parents[2] / "golden" / "corruptions.npz"


class Recorded(Draws):
    """The random numbers that the reference drew, by what they are for."""

    def __init__(self, **numbers: Any) -> None:
        super().__init__(torch.zeros(1, dtype=torch.long), 0, "recorded")
        object.__setattr__(self, "numbers", {name: torch.as_tensor(value) for name, value in numbers.items()})

    def _recorded(self, what: str, *_: Any) -> Tensor:
        number: Tensor = self.numbers[what][None]  # type: ignore[attr-defined]
        return number

    uniform = normal = integers = _recorded  # type: ignore[assignment]


@pytest.fixture(scope="module")
def golden() -> Mapping[str, Any]:
    with np.load(FILE) as file:
        arrays = {name: file[name] for name in file.files}
    return {name: each.astype(np.float32) if each.dtype == np.float16 else each for name, each in arrays.items()}


def images(pixels: Any) -> Tensor:
    """(H, W, 3) or (B, H, W, 3) uint8 as (B, 3, H, W) in [0, 1]."""
    stack = torch.from_numpy(pixels if pixels.ndim == 4 else pixels[None])
    return stack.permute(0, 3, 1, 2).float() / 255


def square(golden: Mapping[str, Any]) -> Tensor:
    image = images(golden["image"])
    return image[..., : image.shape[2]]


def eight_bits(x: Tensor) -> Tensor:
    return (x.clamp(0, 1) * 255 + 1e-3).floor() / 255


@pytest.mark.parametrize("severity", [2, 5])
@pytest.mark.parametrize(
    ("name", "mean", "most"),
    [
        ("defocus_blur", 0.05, 1),
        ("brightness", 0.05, 1),
        ("contrast", 0.05, 1),
        ("pixelate", 0, 0),
        ("jpeg_compression", 0.1, 3),  # another libjpeg may round otherwise
        ("gaussian_blur", 0.05, 1),
        ("saturate", 0.05, 1),
    ],
)
def test_what_is_not_random_equals_the_reference(
    golden: Mapping[str, Any], name: str, severity: int, mean: float, most: float
) -> None:
    x = images(golden["image"])
    made = corrupt(x, name, severity, index=torch.zeros(1, dtype=torch.long), parameters="imagenet")
    levels = (made - images(golden[f"{name}.{severity}"])).abs() / LEVEL
    assert levels.mean() <= mean
    assert levels.max() <= most + 1e-3


def test_motion_blur_equals_the_reference_at_its_angles(golden: Mapping[str, Any]) -> None:
    angles = torch.from_numpy(golden["motion.angles"])
    made = blur.move(images(golden["image"]).expand(3, -1, -1, -1), angles, 10, 3)
    assert ((made * 255).round() / 255 - images(golden["motion.made"])).abs().max() < 1.1 * LEVEL


def test_plasma_equals_the_reference_on_its_random_numbers(golden: Mapping[str, Any]) -> None:
    made = plasma(torch.from_numpy(golden["plasma.noise"])[None], 1.7)[0]
    assert torch.allclose(made, torch.from_numpy(golden["plasma.made"]), atol=1e-5)


def test_glass_blur_equals_the_sequential_loop(golden: Mapping[str, Any]) -> None:
    draws = Recorded(offsets=golden["glass.offsets"].astype(np.int64))
    made = eight_bits(blur.glass_blur(images(golden["image"]), draws, *lookup("imagenet", "glass_blur", 3)))
    levels = (made - images(golden["glass.made"])).abs() / LEVEL
    assert levels.mean() < 0.05
    assert levels.max() < 2  # where the first blur is at the edge of a level


@pytest.mark.parametrize("severity", [1, 5])
def test_zoom_blur_equals_the_formula(golden: Mapping[str, Any], severity: int) -> None:
    made = eight_bits(blur.zoom_blur(square(golden), Recorded(), *lookup("imagenet", "zoom_blur", severity)))
    levels = (made - images(golden[f"zoom.{severity}"])).abs() / LEVEL
    assert levels.mean() < 0.1  # flat areas are at the edge of a level
    assert levels.max() < 1.1


def test_snow_equals_the_formula(golden: Mapping[str, Any]) -> None:
    draws = Recorded(flakes=golden["snow.noise"][None], angle=golden["snow.angle"])
    made = eight_bits(weather.snow(square(golden), draws, *lookup("imagenet", "snow", 4)))
    levels = (made - images(golden["snow.made"])).abs() / LEVEL
    assert levels.mean() < 0.1
    assert levels.max() < 2.1


def test_elastic_transform_equals_the_formula(golden: Mapping[str, Any]) -> None:
    """OpenCV places pixels to 1/32 of a pixel, so single ones at hard edges differ."""
    draws = Recorded(points=golden["elastic.moves"], field=golden["elastic.field"])
    made = eight_bits(digital.elastic_transform(square(golden), draws, *lookup("imagenet", "elastic_transform", 3)))
    levels = (made - images(golden["elastic.made"])).abs() / LEVEL
    assert levels.mean() < 0.6
    assert levels.quantile(0.99) < 5


@pytest.mark.parametrize(("severity", "mean"), [(2, 1.0), (5, 0.05)])
def test_spatter_equals_the_reference(golden: Mapping[str, Any], severity: int, mean: float) -> None:
    """Water (severity 2) differs by the distance transform, which OpenCV approximates to 2 %."""
    x = images(golden["image"])
    draws = Recorded(liquid=golden[f"spatter.noise.{severity}"][None])
    made = eight_bits(spatter(x, draws, *lookup("imagenet", "spatter", severity)))
    wanted = images(golden[f"spatter.{severity}"])
    assert (wanted - x).abs().mean() > 3 * LEVEL  # there is something to see
    assert (made - wanted).abs().mean() < mean * LEVEL

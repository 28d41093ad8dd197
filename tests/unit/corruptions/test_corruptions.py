"""What corruptions promise by themselves: ranges, independence of the batch, distributions, gradients, errors."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from bastion.corruptions import COMMON, EXTRA, NAMES, SEVERITIES, corrupt
from bastion.corruptions.draws import Draws
from bastion.corruptions.frost import _COLOURS, _PHOTOGRAPHS, drawn
from bastion.corruptions.parameters import for_size, lookup
from bastion.corruptions.poisson import _probabilities, _tables
from bastion.corruptions.spatter import canny, distance_to
from bastion.data import datasets
from bastion.errors import BastionError

DIFFERENTIABLE = (
    *("gaussian_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow", "frost_proc", "fog"),
    *("brightness", "contrast", "elastic_transform", "speckle_noise", "gaussian_blur", "saturate", "spatter"),
)
RANDOM = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "glass_blur", "motion_blur", "snow", "frost", "fog"),
    *("elastic_transform", "speckle_noise", "spatter", "frost_proc"),
)


def pictures(count: int, height: int = 32, width: int = 32, channels: int = 3) -> Tensor:
    """Smooth colours with 8 bits."""
    coarse = torch.rand(count, channels, 6, 6, generator=torch.Generator().manual_seed(0))
    smooth = F.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0.02, 0.98)
    return (smooth * 255).round() / 255


def grey(count: int = 1, level: float = 128, side: int = 32) -> Tensor:
    return torch.full((count, 3, side, side), level / 255)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six pictures of the names and sizes of the photographs, each of one grey level."""
    folder = tmp_path_factory.mktemp("frost")
    for number, (width, height) in enumerate([*_PHOTOGRAPHS.values(), (485, 323)], 1):
        pixels = np.full((height, width, 3), 20 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"frost{number}.{'png' if number < 4 else 'jpg'}", quality=100)
    return folder


@pytest.fixture(autouse=True)
def textures(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BASTION_FROST", str(photographs))
    return photographs


@pytest.mark.parametrize("name", NAMES)
def test_an_image_alone_is_corrupted_as_in_company(name: str) -> None:
    x, index = pictures(5), torch.tensor([7, 3, 1000, 4, 12])
    together = corrupt(x, name, 3, index=index)
    alone = torch.cat([corrupt(x[i : i + 1], name, 3, index=index[i : i + 1]) for i in range(5)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 40, 28), (3, 72, 100), (3, 8, 8)])
def test_shape_and_range_stay_and_values_are_8_bit(name: str, shape: tuple[int, int, int]) -> None:
    x = pictures(2, *shape[1:], channels=shape[0])
    if name == "saturate" and shape[0] == 1:
        pytest.skip("needs colours")
    for severity in (1, 4, 5):
        made = corrupt(x, name, severity, index=torch.arange(2))
        assert made.shape == x.shape and made.dtype == x.dtype
        levels = made * 255
        assert (levels - levels.round()).abs().max() < 1e-4
        assert levels.min() >= 0 and levels.max() <= 255.001
        assert not torch.equal(made, x) or shape[1] == 8  # too small to be zoomed by 6 %


@pytest.mark.parametrize("name", NAMES)
def test_double_precision_stays(name: str) -> None:
    x, index = pictures(1), torch.zeros(1, dtype=torch.long)
    made = corrupt(x.double(), name, 2, index=index)
    assert made.dtype == torch.float64
    assert ((made - corrupt(x, name, 2, index=index)).abs() > 0.5 / 255).float().mean() < 0.02  # at the edge of a level


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_that_of_the_images_alone(name: str, half: torch.dtype) -> None:
    x, index = pictures(1).to(half), torch.zeros(1, dtype=torch.long)
    assert torch.equal(corrupt(x, name, 5, index=index), corrupt(x.float(), name, 5, index=index).to(half))


@pytest.mark.parametrize("name", RANDOM)
def test_other_examples_and_seeds_give_other_numbers(name: str) -> None:
    x = pictures(1).expand(2, -1, -1, -1)
    if name in ("frost", "frost_proc"):  # few textures: by chance two examples get the same one
        x = pictures(1).expand(8, -1, -1, -1)
    first = corrupt(x, name, 5, index=torch.arange(len(x)))
    assert not torch.equal(first[:1].expand_as(first), first)
    assert not torch.equal(first, corrupt(x, name, 5, index=torch.arange(len(x)), seed=1))


@pytest.mark.parametrize("name", [*COMMON, *EXTRA])
def test_more_severe_is_further_from_the_image(name: str) -> None:
    if name in ("elastic_transform", "snow", "frost", "saturate", "glass_blur", "spatter"):
        pytest.skip("its severities differ in kind, not in strength alone")
    x = pictures(16, 96, 96)
    far = [
        (corrupt(x, name, severity, index=torch.arange(16)) - x).flatten(1).norm(dim=1).mean()
        for severity in SEVERITIES
    ]
    assert far == sorted(far)


@pytest.mark.parametrize(
    "name",
    ["glass_blur", "motion_blur", "zoom_blur", "contrast", "elastic_transform", "pixelate", "jpeg_compression"],
)
def test_an_image_of_one_grey_stays_as_it_is(name: str) -> None:
    for severity in SEVERITIES:
        made = corrupt(grey(), name, severity, index=torch.zeros(1, dtype=torch.long))
        assert (made - grey()).abs().max() < 1.1 / 255


def test_wide_defocus_brightens_by_one_percent() -> None:
    """The disks of radius 8 and 10 sum to 1.013 and 1.011; that of radius 3 to 1."""
    sums = [float(corrupt_raw("defocus_blur", severity).mean() / (100 / 255)) for severity in (1, 4, 5)]
    assert sums == pytest.approx([1.0, 1.013, 1.011], abs=1e-3)


def corrupt_raw(name: str, severity: int) -> Tensor:
    x = grey(level=100, side=96)
    return corrupt(x, name, severity, index=torch.zeros(1, dtype=torch.long), parameters="imagenet", truncate=False)


@pytest.mark.parametrize("severity", [1, 5])
def test_noise_has_the_moments_of_its_law(severity: int) -> None:
    x, index, n = grey(64, 100), torch.arange(64), 64 * 3 * 32 * 32
    level = 100 / 255

    def noise(name: str) -> Tensor:
        return corrupt(x, name, severity, index=index, truncate=False) - x

    (sigma,) = lookup("cifar", "gaussian_noise", severity)
    made = noise("gaussian_noise")
    assert made.mean().item() == pytest.approx(0, abs=5 * sigma / math.sqrt(n))
    assert made.std().item() == pytest.approx(sigma, rel=0.01)
    (sigma,) = lookup("cifar", "speckle_noise", severity)
    assert noise("speckle_noise").std().item() == pytest.approx(sigma * level, rel=0.01)
    (photons,) = lookup("cifar", "shot_noise", severity)
    made = noise("shot_noise")
    std = math.sqrt(level / photons)  # of Poisson(photons · level) / photons
    assert made.mean().item() == pytest.approx(0, abs=5 * std / math.sqrt(n))
    assert made.std().item() == pytest.approx(std, rel=0.01)
    skew = ((made - made.mean()) ** 3).mean() / made.std() ** 3
    assert skew.item() == pytest.approx(1 / math.sqrt(photons * level), abs=0.03)
    (amount,) = lookup("cifar", "impulse_noise", severity)
    salted = corrupt(x, "impulse_noise", severity, index=index)
    spread = 5 * math.sqrt(amount / 2 / n)
    assert (salted == 1).float().mean().item() == pytest.approx(amount / 2, abs=spread)
    assert (salted == 0).float().mean().item() == pytest.approx(amount / 2, abs=spread)
    assert torch.equal(salted[(salted != 0) & (salted != 1)].unique(), x.unique())


@pytest.mark.parametrize("scale", [3, 500])
def test_alias_tables_hold_the_probabilities(scale: int) -> None:
    thresholds, aliases = (table.numpy().reshape(256, -1) for table in _tables(scale))
    columns = thresholds.shape[1]
    held = thresholds / columns
    for level in (0, 1, 100, 255):
        np.add.at(held[level], aliases[level].astype(int), (1 - thresholds[level]) / columns)
    assert np.allclose(held[[0, 1, 100, 255]], _probabilities(scale, columns)[[0, 1, 100, 255]], atol=1e-7)


def test_poisson_counts_have_the_right_probabilities() -> None:
    """3 photons at full brightness: P(k) = e^-3 3^k / k!."""
    x = torch.ones(8, 3, 64, 64)
    counts = (
        corrupt(x * 0 + 1.0, "shot_noise", 5, index=torch.arange(8), parameters="imagenet", truncate=False) * 3
    ).round()
    n = counts.numel()
    for k in (0, 1, 2):
        wanted = math.exp(-3) * 3**k / math.factorial(k)
        assert (counts == k).float().mean().item() == pytest.approx(wanted, abs=5 * math.sqrt(wanted / n))


def test_the_tails_of_the_normal_numbers_are_there() -> None:
    numbers = Draws(torch.arange(64), 0, "test").normal("x", (20_001,))
    assert numbers.shape == (64, 20_001)
    assert (numbers.abs() > 3).float().mean().item() == pytest.approx(0.0027, abs=2.3e-4)
    assert 4.3 < numbers.abs().max() < 6.6
    pairs = numbers[:, :20_000].view(64, 2, -1)  # the two numbers of one word
    assert abs(float((pairs[:, 0] * pairs[:, 1]).mean())) < 5 / math.sqrt(640_000)


def test_fog_has_the_spectrum_of_its_decay() -> None:
    """A slower decay leaves more of the fine structure."""
    x = torch.zeros(16, 1, 64, 64) + 1.0
    fine = []
    for severity in (1, 3, 5):
        cloud = corrupt(x, "fog", severity, index=torch.arange(16), parameters="imagenet", truncate=False)
        cloud = (cloud - cloud.mean((2, 3), keepdim=True)) / cloud.std((2, 3), keepdim=True)
        power = torch.fft.rfft2(cloud).abs().square()
        fine.append(float(power[..., 16:48, 16:].sum() / power.sum()))
    assert fine[0] < 0.5 * fine[1] < 0.25 * fine[2]


def test_frost_adds_one_of_the_first_five_textures(textures: Path) -> None:
    """Textures of one level each: 20, 40, …, 100; the sixth is never used."""
    x = torch.zeros(200, 3, 32, 32)
    made = corrupt(x, "frost", 1, index=torch.arange(200), textures=textures)
    weight = 0.2
    found = sorted({round(float(level) * 255) for level in made.unique()})
    assert found == [math.floor(weight * 20 * number) for number in range(1, 6)]


def test_drawn_frost_has_the_colours_of_the_photographs() -> None:
    for texture, (mean, std) in zip(drawn(), _COLOURS, strict=True):
        assert texture.shape[0] == 3 and min(texture.shape[1:]) >= 500
        assert (texture.mean((1, 2)) * 255).tolist() == pytest.approx(mean, abs=3)
        assert (texture.std((1, 2)) * 255).tolist() == pytest.approx(std, rel=0.1)


def test_frost_without_its_photographs_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BASTION_FROST")
    with pytest.raises(BastionError, match="BASTION_FROST.*frost_proc"):
        corrupt(pictures(1), "frost", 1, index=torch.zeros(1, dtype=torch.long))
    with pytest.raises(BastionError, match=r"frost1\.png: cannot be read.*frost_proc"):
        corrupt(pictures(1), "frost", 1, index=torch.zeros(1, dtype=torch.long), textures=tmp_path)
    for number in range(1, 6):
        (tmp_path / f"frost{number}.{'png' if number < 4 else 'jpg'}").write_text("no picture")
    with pytest.raises(BastionError, match=r"frost1\.png: not a readable picture"):
        corrupt(pictures(1), "frost", 1, index=torch.zeros(1, dtype=torch.long), textures=tmp_path)


def test_other_pictures_than_the_photographs_of_frost_are_refused(photographs: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(photographs, tmp_path / "frost")
    noise = np.random.default_rng(0).integers(0, 256, (500, 400, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "frost3.png")
    with pytest.raises(BastionError, match=r"frost3\.png: not the photograph .* 400 x 500 pixels, expected 560 x 315"):
        datasets.build({"name": "cifar10-mini", "corruption": "frost", "severity": 1, "textures": str(folder)})


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_without_truncation_the_gradient_is_that_of_the_function(name: str) -> None:
    x = 0.9 * pictures(1).double()
    x[0, 0, 5, 5] = 0.95  # one brightest value, as `fog` divides by it
    x.requires_grad_()
    index = torch.zeros(1, dtype=torch.long)
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e-6
    made = corrupt(x, name, 2, index=index, truncate=False)
    (gradient,) = torch.autograd.grad(made.sum(), x)
    with torch.no_grad():
        difference = sum(
            sign * corrupt((x + sign * direction).clamp(0, 1), name, 2, index=index, truncate=False).sum()
            for sign in (1, -1)
        )
    if name == "glass_blur":  # its 8-bit step has no slope; the gradient leaves it out
        assert gradient.sum() == pytest.approx(x.numel(), rel=0.01)
    else:
        assert float((gradient * direction).sum() * 2) == pytest.approx(float(difference), rel=1e-3, abs=1e-8)


def test_brightness_and_saturation_keep_the_hue() -> None:
    x = torch.tensor([0.2, 0.4, 0.1]).view(1, 3, 1, 1).expand(1, 3, 16, 16)
    index = torch.zeros(1, dtype=torch.long)
    brighter = corrupt(x, "brightness", 5, index=index, parameters="imagenet", truncate=False)
    assert torch.allclose(brighter, x * 0.9 / 0.4)  # V from 0.4 to 0.9
    paler = corrupt(x, "saturate", 1, index=index, parameters="imagenet", truncate=False)
    assert torch.allclose(paler, 0.4 - 0.3 * (0.4 - x))  # S times 0.3
    reddish = corrupt(grey(), "saturate", 5, index=index, parameters="imagenet", truncate=False)[0, :, 0, 0]
    assert torch.allclose(reddish, torch.tensor([1, 0.8, 0.8]) * 128 / 255)


def test_jpeg85_is_the_result_stored_as_jpeg() -> None:
    x, index = pictures(1, 96, 96), torch.zeros(1, dtype=torch.long)
    plain = corrupt(x, "contrast", 2, index=index)
    stored = corrupt(x, "contrast", 2, index=index, jpeg85=True)
    assert 0 < (stored - plain).abs().mean() < 2 / 255


def test_the_parameter_set_follows_the_size() -> None:
    assert [for_size(*size) for size in ((32, 32), (28, 28), (64, 64), (65, 40), (224, 224))] == [
        *("cifar", "cifar", "cifar", "imagenet", "imagenet")
    ]
    x, index = pictures(1), torch.zeros(1, dtype=torch.long)
    own, other = (corrupt(x, "brightness", 1, index=index, parameters=name) for name in ("cifar", "imagenet"))
    assert torch.equal(own, corrupt(x, "brightness", 1, index=index)) and not torch.equal(own, other)


def test_zoom_lists_are_those_of_numpy_arange() -> None:
    stops = {"imagenet": (1.11, 1.16, 1.21, 1.26, 1.31), "cifar": (1.06, 1.11, 1.16, 1.21, 1.26)}
    for name, ends in stops.items():
        for severity, end in zip(SEVERITIES, ends, strict=True):
            step, count = lookup(name, "zoom_blur", severity)  # type: ignore[arg-type]
            assert count == len(np.arange(1, end, step)), (name, severity)


def test_edges_and_distances_of_a_disk() -> None:
    """Canny's edge of a bright disk is its outline, and the distance to it is |r - radius|."""
    line = torch.arange(64) - 32.0
    r = (line[:, None] ** 2 + line**2).sqrt()[None, None]
    edges = canny((r < 12).float() * 200, 50, 150)
    assert ((r[edges] - 12).abs() < 1.5).all() and edges.sum() > 50
    distance = distance_to(edges)
    assert (distance - (r - 12).abs().clamp(max=20)).abs().max() < 1.6
    assert distance_to(torch.zeros_like(edges)).unique().tolist() == [20]


@pytest.mark.parametrize(
    ("x", "name", "severity", "message"),
    [
        (torch.rand(1, 3, 32, 32), "fogg", 1, "unknown corruption 'fogg'; did you mean 'fog'"),
        (torch.rand(1, 3, 32, 32), "fog", 6, "severity must be 1, 2, 3, 4 or 5, got 6"),
        (torch.rand(1, 3, 7, 32), "fog", 1, "at least 8 x 8 pixels, got 7 x 32"),
        (torch.rand(1, 3, 10, 80), "defocus_blur", 5, "radius 10 needs images of at least 11 pixels a side"),
        (torch.rand(1, 3, 32, 32) * 255, "fog", 1, r"must be in \[0, 1\]"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "fog", 1, "divide uint8 images by 255"),
        (torch.rand(1, 4, 32, 32), "fog", 1, "1 or 3"),
        (torch.rand(1, 1, 32, 32), "saturate", 1, "needs colour images of 3 channels, got 1"),
        (torch.rand(2, 3, 32, 32), "fog", 1, "index must be the examples' numbers, 2 integers"),
    ],
)
def test_mistakes_are_told_in_one_line(x: Tensor, name: str, severity: int, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        corrupt(x, name, severity, index=torch.zeros(1, dtype=torch.long))

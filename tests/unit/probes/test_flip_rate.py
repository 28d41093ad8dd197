"""Flip rates of planted classifiers, whose flips are known, and of a network of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bastion.corruptions import PERTURBATIONS
from bastion.errors import BastionError
from bastion.measuring.runner import measure
from bastion.probes import probes
from bastion.suite import load_suite
from bastion.types import Batch

ALEXNET = {  # flip rates on ImageNet-P, Hendrycks and Dietterich 2019
    "gaussian_noise": 0.23653,
    "shot_noise": 0.30062,
    "motion_blur": 0.09297,
    "zoom_blur": 0.05942,
    "snow": 0.11928,
    "brightness": 0.04889,
    "translate": 0.11007,
    "rotate": 0.13104,
    "tilt": 0.07050,
    "scale": 0.23531,
}
RANDOM = ("gaussian_noise", "shot_noise", "speckle_noise", "snow", "spatter")


class Says(nn.Module):
    """A classifier of two classes that says yes or no of each image."""

    def __init__(self, question: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.question = question

    def forward(self, x: Tensor) -> Tensor:
        yes = self.question(x).float()
        return torch.stack([1 - yes, yes], 1)


def batch_of(x: Tensor) -> Batch:
    return Batch(torch.arange(len(x)), x, torch.zeros(len(x), dtype=torch.long))


def rates(question: Callable[[Tensor], Tensor], perturbation: str, x: Tensor) -> list[float]:
    probe = probes.build({"name": "flip-rate", "perturbation": perturbation})
    return probe(Says(question), batch_of(x), seed=0)["flip_rate"].tolist()


def column_at(*columns: int) -> Tensor:
    """Black images with one white column each."""
    x = torch.zeros(len(columns), 3, 32, 32)
    for image, column in zip(x, columns, strict=True):
        image[:, :, column] = 1
    return x


@pytest.mark.parametrize("perturbation", PERTURBATIONS)
def test_a_classifier_that_never_changes_never_flips(perturbation: str) -> None:
    x = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert rates(lambda frame: torch.ones(len(frame)), perturbation, x) == [0.0, 0.0, 0.0]


def test_brightness_flips_once_where_it_crosses_the_threshold() -> None:
    """Grey goes from g - 0.225 to g + 0.225 in 30 steps: across 0.5 if g is nearer to it than that."""
    grey = torch.tensor([0.1, 0.27, 0.29, 0.5, 0.7, 0.74, 0.9])
    x = grey[:, None, None, None].expand(-1, 3, 32, 32)
    once = 1 / 30
    found = rates(lambda frame: frame.mean((1, 2, 3)) > 0.5, "brightness", x)
    assert found == pytest.approx([0, 0, once, once, once, 0, 0])


def test_translate_flips_where_the_column_changes_sides() -> None:
    """From 7 pixels to the left to 8 to the right in 15 steps."""
    in_right_half = lambda frame: frame[..., 16:].sum((1, 2, 3)) > 0  # noqa: E731
    # 3 stays on the left, 8 comes to 16, 22 starts at 15, 23 stays on the right, 24 leaves the image at last.
    found = rates(in_right_half, "translate", column_at(3, 8, 22, 23, 24))
    assert found == pytest.approx([0, 1 / 15, 1 / 15, 0, 1 / 15])
    on_even_column = lambda frame: frame[..., ::2].sum((1, 2, 3)) > 0  # noqa: E731
    assert rates(on_even_column, "translate", column_at(12, 15)) == [1.0, 1.0]


def test_noise_is_compared_with_the_clean_image_and_all_else_with_the_frame_before() -> None:
    """A classifier that knows the clean image: every frame of noise differs from it, though noise never flips to it."""
    x = torch.full((1, 3, 32, 32), 0.5).mul(255).floor().div(255)
    is_clean = lambda frame: (frame == x).flatten(1).all(1)  # noqa: E731
    for perturbation in ("gaussian_noise", "shot_noise", "speckle_noise"):
        assert rates(is_clean, perturbation, x) == [1.0]
    assert rates(is_clean, "brightness", x) == pytest.approx([2 / 30])  # to the clean image and away from it


@pytest.mark.parametrize("perturbation", PERTURBATIONS)
def test_a_rate_does_not_depend_on_what_shares_the_batch(perturbation: str) -> None:
    """A random linear classifier with thresholds so near that many images flip."""
    numbers = torch.Generator().manual_seed(0)
    weights, x = torch.randn(3, 32, 32, generator=numbers), torch.rand(24, 3, 32, 32, generator=numbers)
    model = Says(lambda frame: ((frame * weights).sum((1, 2, 3)) * 0.3).floor() % 2 == 0)
    probe = probes.build({"name": "flip-rate", "perturbation": perturbation})
    batch, some = batch_of(x), torch.tensor([17, 4, 11])
    whole = probe(model, batch, seed=0)["flip_rate"]
    assert len(whole.unique()) > 3
    assert probe(model, batch.select(some), seed=0)["flip_rate"].equal(whole[some])
    assert probe(model, batch, seed=1)["flip_rate"].equal(whole) == (perturbation not in RANDOM)


def test_a_wrong_perturbation_is_refused_when_the_suite_is_read() -> None:
    with pytest.raises(BastionError, match="perturbation"):
        probes.build({"name": "flip-rate", "perturbation": "fog"})


def test_mfr_weighs_flip_rates_by_those_of_alexnet() -> None:
    """A network with AlexNet's flip rates has mFR 100 %."""
    suite = load_suite("imagenet-p")
    weights = suite.members("mFR")
    assert suite.aggregates["mFR"].column == "flip_rate" and len(weights) == 10
    for name, rate in ALEXNET.items():
        assert weights[f"flips perturbation={name}"] * 10 * rate == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("name", "weather"), [("perturbations", "snow"), ("cifar10-p", "spatter")])
def test_the_mean_is_of_ten_perturbations(name: str, weather: str) -> None:
    suite = load_suite(name)
    ten = [weather if perturbation == "snow" else perturbation for perturbation in ALEXNET]
    assert list(suite.members("mean flip rate")) == [f"flips perturbation={each}" for each in ten]
    assert set(suite.aggregates) == {"mean flip rate", *ten}
    for each in ten:
        assert list(suite.members(each)) == [f"flips perturbation={each}"]


def test_a_network_of_the_zoo_through_the_suite(tmp_path: Path) -> None:
    left_out = {f"aggregates.{name}": None for name in [*ALEXNET, "spatter"] if name not in ("brightness", "translate")}
    changes = {"perturbation": ["brightness", "translate"], **left_out}
    model = "zoo/cifar10-linf-resnet"
    facts = measure(model, "cifar10-mini", "cifar10-p", changes=changes, limit=16, folder=tmp_path / "run", workers=1)
    brightness, translate = (
        facts.columns[f"flips perturbation={each}/flip_rate"] for each in ("brightness", "translate")
    )
    for rate, steps in ((brightness, 30), (translate, 15)):
        assert rate.shape == (16,) and np.allclose(rate * steps, np.round(rate * steps), atol=1e-4)
        assert 0 < rate.mean() < 0.2
    mean = facts.numbers()["mean flip rate"]
    assert mean.value == pytest.approx((brightness + translate).mean() / 2) and mean.n == 16
    assert f"mean flip rate   {100 * mean.value:6.2f} %" in facts.table()

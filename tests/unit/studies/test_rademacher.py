"""Lemma 1, against closed forms, all sign vectors of few images, and classifiers that are tried out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from bastion.errors import BastionError
from bastion.models import Classifier
from bastion.studies.rademacher import C, P, Q, Rademacher, suprema
from bastion.types import DataSet

N, D = 8, 5


@pytest.fixture
def signs() -> torch.Tensor:
    """All 256 of eight images: means over them are exact."""
    return torch.tensor(list(itertools.product([-1.0, 1.0], repeat=N)), dtype=torch.float64)


@pytest.fixture
def images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, D, generator=generator, dtype=torch.float64), torch.tensor([1.0, -1.0] * (N // 2)).double()


def mean_absolute_sum(n: int) -> float:
    """E|σ₁ + … + σₙ| for even n."""
    return n * math.comb(n, n // 2) / 2**n


def test_p_2_has_its_closed_form_for_orthogonal_images(signs: torch.Tensor) -> None:
    lengths = torch.arange(1.0, N + 1, dtype=torch.float64)
    values = suprema(torch.diag(lengths), torch.ones(N).double(), signs, 0.0)[:, 1]
    assert torch.allclose(values, lengths.square().sum().sqrt() / N)  # whatever the signs


@pytest.mark.parametrize("column", range(3))
def test_black_images_leave_the_term_of_eps_alone(signs: torch.Tensor, column: int) -> None:
    eps, n, d = 0.3, N, D
    exact = suprema(torch.zeros(n, d).double(), torch.ones(n).double(), signs, eps).mean(0)[column].item()
    assert exact == pytest.approx(eps * d ** (1 - 1 / P[column]) * mean_absolute_sum(n) / (2 * n))


@pytest.mark.parametrize("eps", [0.0, 0.05, 0.5, 5.0])
def test_no_classifier_of_the_class_does_better_and_one_does_as_well(
    images: tuple[torch.Tensor, torch.Tensor], signs: torch.Tensor, eps: float
) -> None:
    (x, y), sigma = images, signs[77]

    def value(theta: torch.Tensor) -> torch.Tensor:  # (…, D)
        return ((y * (theta @ x.T) - eps * theta.abs().sum(-1, keepdim=True)) * sigma).mean(-1)

    drawn = torch.randn(20_000, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gain = ((sigma * y) @ x).abs() - eps * sigma.sum()
    for p, q, best in zip(P, Q, suprema(x, y, sigma[None], eps)[0], strict=True):
        others = value(drawn / torch.linalg.vector_norm(drawn, p, dim=1, keepdim=True))
        assert others.max() <= best + 1e-12
        positive = gain.clamp(min=0)
        power = (positive == positive.max()).double() if q == math.inf else positive ** (q - 1)
        theta = torch.sign((sigma * y) @ x) * torch.where(gain > 0, power, 0)
        size = torch.linalg.vector_norm(theta, p)
        assert value(theta / size if size else theta).item() == pytest.approx(best.item(), abs=1e-12)


@pytest.mark.parametrize("eps", [0.01, 0.3, 10.0])
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_both_bounds_hold(
    images: tuple[torch.Tensor, torch.Tensor], signs: torch.Tensor, eps: float, scale: float
) -> None:
    x, y = images
    clean, adversarial = (suprema(scale * x, y, signs, radius).mean(0) for radius in (0.0, eps))
    extra = torch.tensor([eps * D ** (1 - 1 / p) / math.sqrt(N) for p in P])
    assert (C / 2 * (clean + extra) <= adversarial).all()
    assert (adversarial <= clean + extra).all()
    assert (clean <= adversarial + 1e-12).all()


def test_where_eps_rules_it_grows_as_the_lemma_says(tiny_model: Classifier, tiny_data: DataSet) -> None:
    study = Rademacher(eps=100, images=48, sides=(2, 4, 8), draws=200)
    parts = [study(tiny_model, tiny_data, part, seed=0) for part in range(study.parts(tiny_model, tiny_data))]
    assert [part["dimension"].item() for part in parts] == [12, 48, 192]
    for column, power in enumerate((0, 0.5, 1)):
        growth = (parts[2]["adversarial"] / parts[0]["adversarial"])[column].item()
        assert math.log(growth) / math.log(192 / 12) == pytest.approx(power, abs=0.02)


def test_draws_agree_with_all_signs(tiny_model: Classifier, tiny_data: DataSet, signs: torch.Tensor) -> None:
    study = Rademacher(images=N, sides=(4,), draws=4000)
    facts = study(tiny_model, tiny_data, 0, seed=0)
    batch = tiny_data.train.batch(range(N))
    x = torch.nn.functional.avg_pool2d(batch.x.double(), 2).flatten(1)
    y = torch.where(batch.y < 1.5, 1.0, -1.0).double()
    exact = suprema(x - x.mean(0), y, signs, 8 / 255).mean(0)
    assert ((facts["adversarial"] - exact).abs() < 4 * facts["adversarial_error"]).all()
    assert (facts["lower"] <= facts["adversarial"]).all() and (facts["adversarial"] <= facts["upper"]).all()


def test_sides_are_those_of_the_images_and_halves(tiny_model: Classifier, tiny_data: DataSet) -> None:
    assert Rademacher()._sides(tiny_data) == (4, 8)
    with pytest.raises(BastionError, match=r"rademacher\.sides: the images of tiny have 8 pixels a side, got 16"):
        Rademacher(sides=(4, 16)).parts(tiny_model, tiny_data)

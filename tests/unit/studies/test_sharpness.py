"""Hessians that are known: of a quadratic, of linear softmax regression, and by finite differences."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tests.vits import right_batch, small_vit
from torch import Tensor, nn

from bastion import Threat, memory
from bastion.attacks.pgd import fgsm
from bastion.errors import BastionError
from bastion.models import Classifier
from bastion.models.checkpoint import digest
from bastion.settings import SettingsError
from bastion.studies import sharpness
from bastion.studies.complexity import peak_memory
from bastion.studies.hessian import hutchinson, lanczos
from bastion.studies.sharpness import Sharpness
from bastion.studies.weight_space import WeightLoss, trained_weights
from bastion.types import DataSet

GENERATOR = torch.Generator().manual_seed(0)


def with_spectrum(values: Tensor) -> Tensor:
    basis, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=GENERATOR, dtype=torch.float64))
    return basis @ torch.diag(values) @ basis.T


def drawn(count: int, length: int) -> Tensor:
    return torch.randn(count, length, generator=GENERATOR, dtype=torch.float64)


def signs(count: int, length: int) -> Tensor:
    return drawn(count, length).sign()


def quadratic(matrix: Tensor) -> torch.autograd.graph.Node:
    """The Hessian's product of ½wᵀAw + b·w, by two backward passes."""
    offset = drawn(1, len(matrix))[0]

    def product(vector: Tensor) -> Tensor:
        w = torch.ones(len(matrix), dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad(w @ matrix @ w / 2 + offset @ w, w, create_graph=True)
        return torch.autograd.grad(first @ vector, w)[0]

    return product  # type: ignore[return-value]


@pytest.fixture
def regression(tiny_data: DataSet) -> tuple[nn.Module, Tensor]:
    """Linear softmax regression on 24 images, and its Hessian in weights and biases: mean of (diag p - ppᵀ) ⊗ xxᵀ."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    with torch.no_grad():
        model[1].weight.copy_(drawn(3, 192) / 20)
    batch = tiny_data.train.batch(range(24))
    x = torch.cat([batch.x.flatten(1), torch.ones(24, 1)], dim=1).double()
    p = model(batch.x).softmax(1).double().detach()
    curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    dense = torch.einsum("nab,ni,nj->aibj", curvature, x, x).reshape(3 * 193, 3 * 193) / 24
    return model, dense


def test_the_spectrum_of_a_quadratic_is_found() -> None:
    values = torch.cat([torch.tensor([9.0, 7.0, 7.0, 4.0]), torch.linspace(-1, 1, 56)]).double()
    matrix = with_spectrum(values)
    found = lanczos(quadratic(matrix), drawn(1, 60)[0], wanted=2, iterations=60, tolerance=1e-8)  # type: ignore[arg-type]
    assert len(found.values) < 60
    assert found.values[:2].tolist() == pytest.approx([9, 7], abs=1e-6)
    distance = (found.values[:, None] - values).abs().amin(1)
    assert (distance <= found.residuals + 1e-10).all()  # a residual is what it says


def test_eigenvalues_that_did_not_converge_say_so() -> None:
    matrix, start = with_spectrum(torch.linspace(0, 1, 60).double()), drawn(1, 60)[0]
    cut, done = (
        lanczos(lambda vector: matrix @ vector, start, wanted=3, iterations=count, tolerance=1e-6) for count in (5, 60)
    )
    assert not cut.converged and cut.residuals[:3].max() > 1e-6
    assert done.converged and done.residuals[:3].max() <= 1e-6
    assert lanczos(torch.zeros_like, start, wanted=3, iterations=5, tolerance=1e-6).converged


@pytest.mark.parametrize(("iterations", "unconverged"), [(6, True), (60, False)])
def test_the_study_warns_of_them(
    regression: tuple[nn.Module, Tensor], tiny_data: DataSet, iterations: int, unconverged: bool
) -> None:
    facts = Sharpness(n=24, eigenvalues=4, iterations=iterations, probes=2)(regression[0], tiny_data, 0, seed=0)
    assert facts["warning.unconverged"].item() is unconverged
    exact = torch.linalg.eigvalsh(regression[1])
    assert (exact - facts["lowest"]).abs().min() <= facts["lowest_residual"] + 1e-6


def test_it_ends_where_the_start_reaches_no_further() -> None:
    found = lanczos(lambda vector: 3 * vector, drawn(1, 20)[0], wanted=1, iterations=10, tolerance=0.0)
    assert found.values.tolist() == pytest.approx([3])
    assert lanczos(torch.zeros_like, drawn(1, 20)[0], wanted=1, iterations=10, tolerance=0.0).values.tolist() == [0]


def test_the_trace_is_exact_for_a_diagonal_and_within_its_error_otherwise() -> None:
    values = torch.arange(1.0, 31).double()
    assert hutchinson(lambda vector: values * vector, signs(5, 30)) == (pytest.approx(465), pytest.approx(0))
    matrix = with_spectrum(values)
    trace, error = hutchinson(lambda vector: matrix @ vector, signs(2000, 30))
    deviation = math.sqrt(2 * (matrix.square().sum() - matrix.diagonal().square().sum()).item() / 2000)
    assert error == pytest.approx(deviation, rel=0.1)
    assert abs(trace - 465) < 4 * error


def test_products_are_those_of_the_dense_hessian(regression: tuple[nn.Module, Tensor], tiny_data: DataSet) -> None:
    model, dense = regression
    loss = WeightLoss(model, tiny_data.train.batch(range(24)), 10)
    vector = drawn(3, 193).float()
    product = loss.hessian_product(
        trained_weights(model, "test"), {"1.weight": vector[:, :-1], "1.bias": vector[:, -1]}
    )
    found = torch.cat([product["1.weight"], product["1.bias"][:, None]], dim=1)
    assert torch.allclose(found.double(), (dense @ vector.double().flatten()).view(3, 193), atol=1e-6)


def test_eigenvalues_and_trace_of_softmax_regression(regression: tuple[nn.Module, Tensor], tiny_data: DataSet) -> None:
    model, dense = regression
    facts = Sharpness(n=24, batch=10, eigenvalues=4, iterations=60, tolerance=1e-5, probes=50)(
        model, tiny_data, 0, seed=0
    )
    exact = torch.linalg.eigvalsh(dense).flip(0)
    assert facts["eigenvalues"].tolist() == pytest.approx(exact[:4].tolist(), rel=1e-3)
    assert facts["top"] == facts["eigenvalues"][0]
    assert abs(facts["lowest"].item()) < 1e-4  # a convex loss
    assert (facts["residuals"] <= 1e-5 * facts["top"]).all() and facts["products"] < 60
    assert abs(facts["trace"] - dense.trace()) < 4 * facts["trace_error"]
    assert facts["dimension"] == 3 * 193


@pytest.mark.parametrize("class_token", [True, False])
def test_products_of_a_vit_are_differences_of_its_gradient(class_token: bool) -> None:
    model = small_vit(class_token=class_token, depth=1)
    loss, weights = WeightLoss(model, right_batch(model), 4), trained_weights(model, "test")
    vector = {name: drawn(1, weight.numel())[0].view_as(weight) for name, weight in weights.items()}
    ahead, behind = (
        loss.gradient({name: weights[name] + step * vector[name] for name in weights})[1] for step in (1e-7, -1e-7)
    )
    for name, product in loss.hessian_product(weights, vector).items():
        difference = (ahead[name] - behind[name]) / 2e-7
        assert (product - difference).norm() <= 1e-4 * product.norm() + 1e-7


def test_one_step_in_the_ball_goes_along_the_gradient_to_its_edge(
    regression: tuple[nn.Module, Tensor], tiny_data: DataSet
) -> None:
    model, batch = regression[0], tiny_data.train.batch(range(24))
    weight = model[1].weight  # type: ignore[index]
    before = F.cross_entropy(model(batch.x), batch.y)
    (gradient,) = torch.autograd.grad(before, weight)
    with torch.no_grad():
        edge = weight + 0.05 * weight.norm() * gradient / gradient.norm()
        after = F.cross_entropy(F.linear(batch.x.flatten(1), edge, model[1].bias), batch.y)  # type: ignore[index]
    one, five = (
        Sharpness(n=24, rho=0.05, steps=steps, iterations=6, probes=2)(model, tiny_data, 0, seed=0) for steps in (1, 5)
    )
    assert one["loss"].item() == pytest.approx(before.item(), rel=1e-5)
    assert one["rise"].item() == pytest.approx((after - before).item(), rel=1e-3)
    assert five["rise"] >= one["rise"]  # a convex loss is largest at the edge


def test_the_loss_under_attack_is_larger_and_the_model_stays_as_it_is(
    tiny_model: Classifier, tiny_data: DataSet
) -> None:
    before = digest(tiny_model)
    small = {"n": 24, "iterations": 6, "probes": 2}
    clean = Sharpness(**small)(tiny_model, tiny_data, 0, seed=0)
    attacked = Sharpness(**small, threat=Threat("linf", 0.1), attack=fgsm())(tiny_model, tiny_data, 0, seed=0)
    assert attacked["loss"] > clean["loss"]
    assert digest(tiny_model) == before and all(each.grad is None for each in tiny_model.parameters())
    assert {name: value.shape for name, value in clean.items()} == {
        name: value.shape for name, value in attacked.items()
    }


def test_more_eigenvalues_than_dimensions_are_nan(tiny_data: DataSet) -> None:
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3, bias=False))
    facts = Sharpness(n=24, eigenvalues=12, iterations=20, probes=2)(model, tiny_data, 0, seed=0)
    assert facts["eigenvalues"].shape == (12,) and facts["eigenvalues"][9:].isnan().all()


def test_what_does_not_fit_is_refused_before_it_starts(
    tiny_model: Classifier, tiny_data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_available", lambda device: 2**10)
    with pytest.raises(BastionError, match="sharpness: 40 vectors .* and 24 images at once: needs 0.0 GiB of memory"):
        Sharpness(n=24)(tiny_model, tiny_data, 0, seed=0)


WIDE = nn.Sequential(nn.Flatten(), nn.Linear(192, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 3))
POINTWISE = [each for _ in range(5) for each in (nn.Conv2d(3, 3, 1), nn.Tanh())]
DEEP = nn.Sequential(*POINTWISE, nn.Flatten(), nn.Linear(192, 3))


@pytest.mark.parametrize("model", [WIDE, DEEP], ids=["vectors", "graphs"])
def test_the_memory_that_is_asked_for_is_what_is_used(
    model: nn.Module, tiny_data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the Lanczos vectors of many weights, and of the graphs of products where weights are few."""
    asked: list[int] = []
    monkeypatch.setattr(sharpness, "check_memory", lambda needed, *_: asked.append(needed))
    study = Sharpness(n=24, iterations=10, probes=2, tolerance=1e-9)
    used = peak_memory(lambda: study(model, tiny_data, 0, seed=0), torch.device("cpu"))
    assert 0.7 * used < asked[0] < 2.5 * used


def test_wrong_settings_are_one_line() -> None:
    with pytest.raises(SettingsError, match="both `threat` and `attack`"):
        Sharpness(attack=fgsm())
    with pytest.raises(SettingsError, match="iterations: 5 eigenvalues take more than as many products, got 3"):
        Sharpness(iterations=3)

"""Self-attention's Jacobian in closed form, and its bound on a bounded domain (Theorem 1 of Wang and Ruan 2022)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bastion.jacobians.attention import Heads, head_jacobian


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attended(z: Tensor, a: Tensor, c: Tensor) -> Tensor:
    return (z @ a @ z.T + z @ c).softmax(1) @ z


def by_autograd(z: Tensor, a: Tensor, c: Tensor) -> Tensor:
    made: Tensor = torch.autograd.functional.jacobian(lambda each: attended(each, a, c), z)
    return made.reshape(z.numel(), z.numel())


@pytest.mark.parametrize(("tokens", "width"), [(3, 1), (5, 1), (4, 3), (6, 2)])
def test_the_closed_form_is_what_autograd_finds(tokens: int, width: int) -> None:
    z, a, c = draw(tokens, width), draw(width, width, seed=1), draw(width, seed=2)
    assert torch.allclose(head_jacobian(z, a, c), by_autograd(z, a, c), atol=1e-12)


def test_eq_5_of_the_paper_is_right_with_its_middle_term_turned_round() -> None:
    z, a = draw(3), 0.7
    p = (a * z[:, None] * z).softmax(1)
    mean = p @ z
    variance = p @ z**2 - mean**2
    outer, diagonal = z.diag() @ p @ z.diag(), variance.diag()
    corrected = a * (outer - mean.diag() @ z.diag() @ p + diagonal) + p
    printed = a * (outer - p @ z.diag() @ mean.diag() + diagonal) + p
    right = by_autograd(z[:, None], torch.tensor([[a]]).double(), torch.zeros(1).double())
    assert torch.allclose(corrected, right, atol=1e-12)
    assert (printed - right).abs().max() > 0.01


def multi_head(z: Tensor, q: Tensor, bias: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> Tensor:
    scores = scale * ((z @ q.mT) + bias[:, None]) @ (z @ k.mT).mT  # (H, N, N)
    mixed = scores.softmax(2) @ (z @ v.mT)
    return mixed.transpose(0, 1).flatten(1) @ out.T


@pytest.mark.parametrize("radius", [0.1, 1.0, 3.0])
def test_no_point_of_the_domain_has_a_larger_jacobian_than_the_bound(radius: float) -> None:
    weights = (
        draw(2, 3, 6, seed=1),
        draw(2, 3, seed=2),
        draw(2, 3, 6, seed=3),
        draw(2, 3, 6, seed=4),
        draw(6, 6, seed=5),
    )
    bound = Heads.of(*weights, scale=0.5).upper_bound(torch.tensor([radius], dtype=torch.float64), tokens=5)
    largest = 0.0
    for seed in range(20):
        z = draw(5, 6, seed=seed)
        z = radius * z / z.norm(dim=1, keepdim=True)
        jacobian = torch.autograd.functional.jacobian(lambda each: multi_head(each, *weights, scale=0.5), z)
        largest = max(largest, float(torch.linalg.matrix_norm(jacobian.reshape(30, 30), 2)))
    assert largest <= float(bound)
    assert largest >= float(bound) / 100  # and the bound says something


@pytest.mark.parametrize("radius", [10.0, 100.0])
def test_without_a_bound_on_tokens_the_jacobian_has_none(radius: float) -> None:
    """Kim et al. 2021: a token at 0 sees all others alike, and their variance, which grows with the square."""
    z = radius * torch.tensor([[0.0], [1.0], [-1.0]], dtype=torch.float64)
    norm = torch.linalg.matrix_norm(head_jacobian(z, torch.ones(1, 1).double()), 2)
    assert norm >= 2 / 3 * radius**2

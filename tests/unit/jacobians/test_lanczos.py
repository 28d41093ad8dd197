"""Singular values of matrices that are known: prescribed ones, several times the same, none at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from bastion.jacobians.lanczos import SingularValues, largest

SHAPES = [(40, 40), (30, 90), (90, 30)]
PRESCRIBED: dict[str, Sequence[float]] = {
    "spread": [9, 7, 5, 3, 2, 1],
    "all equal": [5] * 30,
    "equal at the top": [5, 5, 5, 1, 1, *[0.5] * 20],
    "clustered": [10, 9.9999, 9.9998, 9.9997, 9.9996, 9, *[1] * 24],
    "equal ones behind the wanted": [7] * 20 + [6.99] * 10,
    "dense": [2 - i / 30 for i in range(30)],
    "of rank 3": [3, 2, 1],
    "of rank 1": [4],
    "zero": [0],
}


class Matrices:
    """A matrix for each example; counts products."""

    noise = 0.0

    def __init__(self, matrices: Tensor) -> None:
        self.matrices, self.products = matrices, 0
        self.outputs, self.inputs = matrices.shape[1:]

    def apply(self, v: Tensor) -> Tensor:
        self.products += 1
        return (self.matrices @ v[:, :, None])[:, :, 0]

    def transpose(self, u: Tensor) -> Tensor:
        self.products += 1
        return (self.matrices.mT @ u[:, :, None])[:, :, 0]


def made(prescribed: Sequence[Sequence[float]], shape: tuple[int, int], dtype: torch.dtype = torch.float64) -> Tensor:
    """(B, m, n) with these singular values and random vectors."""
    draw, made = torch.Generator().manual_seed(0), []
    for values in prescribed:
        left, right = (
            torch.linalg.qr(torch.randn(side, side, dtype=torch.float64, generator=draw)).Q for side in shape
        )
        made.append(left[:, : len(values)] * torch.tensor(values, dtype=torch.float64) @ right[: len(values)])
    return torch.stack(made).to(dtype)


def starts(matrices: Tensor, seed: int = 0) -> Callable[[int], Tensor]:
    """Each example's own, whatever is beside it."""

    def start(number: int) -> Tensor:
        draw = torch.Generator().manual_seed(1000 * seed + number)
        return (
            torch.randn(matrices.shape[2], dtype=torch.float64, generator=draw).to(matrices).expand(len(matrices), -1)
        )

    return start


def search(matrices: Tensor, **options: int | float) -> SingularValues:
    return largest(Matrices(matrices), starts(matrices), **options)  # type: ignore[arg-type]


def relative_errors(found: SingularValues, matrices: Tensor) -> Tensor:
    right = torch.linalg.svdvals(matrices.double())[:, : found.values.shape[1]]
    return (found.values - right).abs() / right[:, :1].clamp(min=1e-30)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("top", [1, 5])
def test_values_are_the_prescribed_ones_with_their_multiplicities(shape: tuple[int, int], top: int) -> None:
    matrices = made(list(PRESCRIBED.values()), shape)
    found = search(matrices, top=top)
    for name, errors, residuals in zip(PRESCRIBED, relative_errors(found, matrices), found.residuals, strict=True):
        assert errors.max() < 1e-4, name
        assert residuals.max() <= 1e-4, name


@pytest.mark.parametrize("top", [1, 5])
def test_float32_is_as_good_as_the_tolerance_asks(top: int) -> None:
    matrices = made(list(PRESCRIBED.values()), (30, 90), torch.float32)
    found = search(matrices, top=top)
    assert relative_errors(found, matrices).max() < 1e-4
    assert found.residuals.max() <= 1e-4


def test_a_small_basis_restarts_and_ends_at_the_same_values() -> None:
    matrices = made([PRESCRIBED["dense"], PRESCRIBED["clustered"]], (90, 30))
    roomy, tight = (search(matrices, top=3, basis=basis) for basis in (64, 8))
    assert torch.allclose(roomy.values, tight.values, rtol=1e-6)
    assert tight.residuals.max() <= 1e-4
    assert (tight.products > roomy.products)[0]


@pytest.mark.parametrize("basis", [16, 64, 400])
def test_vectors_stay_orthogonal_in_float32_over_many_steps(basis: int) -> None:
    """Vectors that are not give values above the largest. One pass of orthogonalisation gives 30 here, not 2."""
    matrices = made([[1 + 1 / (1 + i / 3) for i in range(300)]], (400, 400), torch.float32)
    found = search(matrices, basis=basis, tolerance=1e-5, top=4)
    assert relative_errors(found, matrices).max() < 2e-6
    assert found.residuals.max() <= 1e-5


def test_the_rest_of_the_batch_does_not_matter() -> None:
    matrices = made(list(PRESCRIBED.values()), (40, 40))
    together = search(matrices, top=3)
    for row in range(len(matrices)):
        alone = search(matrices[row : row + 1], top=3)
        assert torch.allclose(alone.values[0], together.values[row], rtol=1e-12, atol=1e-12)
        assert alone.products[0] == together.products[row]


@pytest.mark.parametrize("top", [1, 3])
def test_a_map_that_is_not_finite_has_no_values_and_harms_no_other(top: int) -> None:
    matrices = made([PRESCRIBED["dense"]] * 3, (40, 40))
    alone = search(matrices[:1], top=top)
    matrices[1, 2, 3] = torch.nan
    matrices[2, 0, 0] = torch.inf
    found = search(matrices, top=top)
    assert torch.allclose(found.values[0], alone.values[0], rtol=1e-12)
    assert found.values[1:].isnan().all() and found.residuals[1:].isnan().all()
    assert (found.products[1:] <= found.products[0]).all()


@pytest.mark.parametrize("limit", [2, 8, 12, 16, 20, 24, 30])
@pytest.mark.parametrize("top", [1, 3, 5])
def test_a_residual_bounds_the_error_and_tells_of_a_search_that_was_cut_short(top: int, limit: int) -> None:
    """Also of values that were found orthogonally to others, which the cut left inexact."""
    matrices = torch.randn(8, 30, 45, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cut = search(matrices, top=top, limit=limit)
    right = torch.linalg.svdvals(matrices)
    nearest = (cut.values[:, :, None] - right[:, None]).abs().amin(2)
    assert (nearest <= cut.residuals * cut.values[:, :1] * (1 + 1e-9)).all()
    wrong = relative_errors(cut, matrices).amax(1) > 1e-4
    assert (cut.residuals.amax(1) > 1e-4)[wrong].all()


def test_products_are_counted() -> None:
    matrices = made([PRESCRIBED["spread"]], (40, 40))
    operator = Matrices(matrices)
    found = largest(operator, starts(matrices), top=2)
    assert found.products.tolist() == [operator.products]


def test_a_tighter_tolerance_gives_a_smaller_residual() -> None:
    matrices = made([PRESCRIBED["dense"]], (40, 40))
    assert search(matrices, tolerance=1e-10).residuals.max() <= 1e-10


def test_another_start_ends_at_the_same_value() -> None:
    matrices = made([PRESCRIBED["dense"]], (40, 40))
    values = [largest(Matrices(matrices), starts(matrices, seed), tolerance=1e-6).values.item() for seed in range(3)]
    assert values == pytest.approx([2.0] * 3, rel=1e-9)


def test_it_takes_fewer_products_than_power_iteration_at_equal_accuracy() -> None:
    matrices = made([PRESCRIBED["dense"]], (40, 40))
    found = search(matrices)
    v, products = starts(matrices)(0), 0
    while True:
        u = matrices @ v[:, :, None]
        sigma = u.norm() / v.norm()
        back = (matrices.mT @ (u / u.norm()))[:, :, 0]
        products += 2
        if (back - sigma * v / v.norm()).norm() <= 1e-4 * sigma:
            break
        v = back
    assert products > 3 * int(found.products)

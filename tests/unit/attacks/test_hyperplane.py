"""Moves to a hyperplane are the shortest there are: closed forms, a general solver, the reference implementation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles import distance
from tests.unit.attacks.test_oracles import NORMS, solved
from torch import Tensor, nn

from bastion.attacks.hyperplane import DUAL, nearest_boundary, to_hyperplane
from bastion.threat import Norm, Threat, length, project

Planes = tuple[Tensor, Tensor, Tensor]


def planes(rows: int = 40, size: int = 30, seed: int = 0, dtype: torch.dtype = torch.float64) -> Planes:
    """Points, normals and offsets of planes that cut the box, on either side of the points."""
    generator = torch.Generator().manual_seed(seed)
    x, inside = torch.rand(2, rows, size, generator=generator, dtype=dtype)
    normal = torch.randn(rows, size, generator=generator, dtype=dtype)
    x[:4] = x[:4].round()  # corners of the box
    return x, normal, (normal * inside).sum(1)


@given(
    norm=st.sampled_from(NORMS),
    size=st.sampled_from([1, 2, 3, 8, 60]),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    zeros=st.sampled_from([0.0, 0.5, 1.0]),
    far=st.sampled_from([0.0, 0.1, 1.0, 30.0]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=250, deadline=None)
def test_a_move_stays_in_the_box_reaches_the_plane_and_is_the_shortest(
    norm: Norm, size: int, scale: float, zeros: float, far: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(6, size, generator=generator, dtype=torch.float64)
    x[0] = x[0].round()
    normal = scale * torch.randn(6, size, generator=generator, dtype=torch.float64)
    normal *= torch.rand(6, size, generator=generator) >= zeros
    normal[normal.abs() <= 1e-7] = 0  # l2 and l1 leave such coordinates alone
    gap = far * scale * torch.randn(6, generator=generator, dtype=torch.float64)  # ⟨normal, x⟩ has to change by this
    move = to_hyperplane(norm, x, normal, (normal * x).sum(1) + gap)
    assert move.isfinite().all()
    assert (x + move >= -1e-12).all() and (x + move <= 1 + 1e-12).all()
    towards = normal * gap.sign()[:, None]
    shortest = distance(norm, towards, x, gap.abs())
    reachable = shortest.isfinite()
    gained = (towards * move).sum(1)
    tolerance = 2e-6 * scale * size
    assert torch.allclose(gained[reachable], gap.abs()[reachable], atol=tolerance, rtol=1e-6)
    assert torch.allclose(length(norm, move)[reachable], shortest[reachable], atol=1e-6, rtol=2e-6)
    # Out of reach: the corner nearest to the plane.
    corner = torch.where(towards > 0, 1.0, torch.where(towards < 0, 0.0, x)).double() - x
    assert torch.allclose(move[~reachable], corner[~reachable], atol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
def test_a_move_is_as_short_as_a_general_solver_finds(norm: Norm) -> None:
    x, normal, offset = planes(rows=12, size=6, seed=3)
    moves = to_hyperplane(norm, x, normal, offset)
    for row in range(len(x)):
        gap = (offset - normal[row] @ x[row])[row].item()
        sign = 1 if gap > 0 else -1
        assert length(norm, moves[row : row + 1]).item() == pytest.approx(
            solved(norm, sign * normal[row], x[row], need=abs(gap)), abs=2e-6
        )


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("size", [1, 7, 300])
def test_moves_are_the_references(norm: Norm, size: int) -> None:
    projections = pytest.importorskip("pyautoattack.fab_projections")
    theirs = {"linf": "projection_linf", "l2": "projection_l2", "l1": "projection_l1"}[norm]
    x, normal, offset = planes(size=size, seed=size, dtype=torch.float32)
    x = 0.02 + 0.96 * x  # at a corner the reference divides zero by zero
    expected = getattr(projections, theirs)(x, normal, offset)
    moves = to_hyperplane(norm, x, normal, offset)
    assert torch.allclose(length(norm, moves), length(norm, expected), atol=2e-5, rtol=1e-4)
    assert torch.allclose(moves, expected, atol=2e-5 if size < 300 else 2e-4, rtol=1e-4)


@pytest.mark.parametrize("norm", NORMS)
def test_a_point_on_the_plane_stays_and_a_flat_function_moves_nobody(norm: Norm) -> None:
    x, normal, _ = planes()
    on = to_hyperplane(norm, x, normal, (normal * x).sum(1))
    assert (on == 0).all()
    assert (to_hyperplane(norm, x, torch.zeros_like(normal), torch.ones(len(x), dtype=x.dtype)) == 0).all()


@pytest.mark.parametrize("norm", NORMS)
def test_pixels_that_do_not_matter_stay_even_if_the_plane_is_out_of_reach(norm: Norm) -> None:
    """An infinite step along a weight of zero is no step."""
    x = torch.tensor([[0.5, 0.5, 0.25]], dtype=torch.float64)
    move = to_hyperplane(norm, x, torch.tensor([[1.0, 0.0, -2.0]], dtype=torch.float64), torch.tensor([9.0]).double())
    assert move.tolist() == [[0.5, 0.0, -0.25]]


@given(
    norm=st.sampled_from(NORMS),
    radii=st.lists(st.sampled_from([0.0, 1e-9, 1e-3, 0.05, 0.4, 1.0]), min_size=1, max_size=6),
    spread=st.sampled_from([1e-3, 0.1, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=150, deadline=None)
def test_projections_with_a_radius_for_each_row_are_those_with_one(
    norm: Norm, radii: list[float], spread: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x0 = torch.rand(len(radii), 2, 3, 4, generator=generator, dtype=dtype)
    x0[0] = x0[0].round()
    x = x0 + spread * torch.randn(x0.shape, generator=generator, dtype=dtype)
    together = project(norm, x0, x, torch.tensor(radii, dtype=torch.float64))
    for row, radius in enumerate(radii):
        alone = project(norm, x0[row : row + 1], x[row : row + 1], radius)
        assert torch.equal(together[row : row + 1], alone)
        assert Threat(norm, radius).contains(x0[row : row + 1], alone).all()


@pytest.mark.parametrize("norm", NORMS)
def test_the_way_does_not_depend_on_the_length_of_the_normal(norm: Norm) -> None:
    x, normal, offset = planes(dtype=torch.float32)
    expected = to_hyperplane(norm, x, normal, offset)
    for scale in (2.0**-40, 2.0**40):
        assert torch.allclose(to_hyperplane(norm, x, scale * normal, scale * offset), expected, atol=1e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_the_nearest_boundary_is_that_of_the_whole_jacobian(norm: Norm) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 7)).double()
    x = torch.rand(9, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    logits = net(x)
    y = logits.argmax(1)
    target, normal = nearest_boundary(norm, logits, y, x, 6)
    for row in range(9):
        jacobian = torch.autograd.functional.jacobian(lambda point: net(point[None])[0], x[row].detach())
        slopes = jacobian - jacobian[y[row]]
        away = (logits[row] - logits[row, y[row]]).abs() / length(DUAL[norm], slopes.flatten(1)).clamp(min=1e-30)
        away[y[row]] = torch.inf
        assert target[row] == away.argmin()
        assert torch.allclose(normal[row], slopes[target[row]], atol=1e-12)


def test_only_the_likeliest_classes_are_looked_at() -> None:
    x = torch.full((1, 1, 1, 2), 0.5, requires_grad=True)
    slopes = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 100.0]])
    logits = x.flatten(1) @ slopes.T
    logits = logits - logits.detach() + torch.tensor([[0.0, -1.0, -2.0]])
    y = torch.tensor([0])
    assert nearest_boundary("l2", logits, y, x, 2)[0].tolist() == [2]
    logits = x.flatten(1) @ slopes.T
    logits = logits - logits.detach() + torch.tensor([[0.0, -1.0, -2.0]])
    assert nearest_boundary("l2", logits, y, x, 1)[0].tolist() == [1]

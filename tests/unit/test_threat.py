"""The geometry of ball ∩ box: projections are nearest points, random points are uniform, directions are steepest."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from bastion import BastionError, Threat
from bastion.threat import project_l1, project_l2

NORMS = ["linf", "l2", "l1"]
THREATS = [Threat("linf", 8 / 255), Threat("l2", 0.5), Threat("l1", 12.0)]
ids = [threat.norm for threat in THREATS]


def _images(n: int, seed: int = 0, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (3, 8, 8)) -> Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _bisected(x0: Tensor, x: Tensor, eps: float, norm: str) -> Tensor:
    """The same projection by 200 bisections of its one multiplier: slow, and obviously right."""
    v = x - x0
    cap = torch.where(v > 0, 1 - x0, x0)

    def point(m: Tensor) -> Tensor:
        size = (v.abs() - m).clamp(min=0) if norm == "l1" else v.abs() / (1 + m)
        return torch.minimum(size, cap)

    def outside(z: Tensor) -> Tensor:
        return (z.sum(1, keepdim=True) if norm == "l1" else z.norm(dim=1, keepdim=True)) > eps

    low = torch.zeros(len(x), 1, dtype=x.dtype)
    high = torch.where(outside(point(low)), 1e18, 0.0).to(x.dtype)
    for _ in range(200):
        middle = (low + high) / 2
        out = outside(point(middle))
        low, high = torch.where(out, middle, low), torch.where(out, high, middle)
    return x0 + v.sign() * point(high)


@given(
    size=st.sampled_from([1, 2, 3, 7, 50, 400]),
    eps=st.sampled_from([0.0, 1e-3, 0.1, 0.7, 3.0, 40.0]),
    spread=st.sampled_from([1e-3, 0.1, 1.0, 5.0]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=150, deadline=None)
def test_projections_match_bisection(size: int, eps: float, spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x0 = torch.rand(5, size, generator=generator, dtype=torch.float64)
    x0[0] = x0[0].round()  # an image on the corners of the box
    x = x0 + spread * torch.randn(5, size, generator=generator, dtype=torch.float64)
    assert torch.allclose(project_l1(x0, x, eps), _bisected(x0, x, eps, "l1"), atol=1e-10, rtol=0)
    assert torch.allclose(project_l2(x0, x, eps), _bisected(x0, x, eps, "l2"), atol=1e-10, rtol=0)


@pytest.mark.parametrize("threat", THREATS, ids=ids)
@pytest.mark.parametrize("spread", [0.01, 0.3, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_projected_points_are_inside_and_inside_points_stay(threat: Threat, spread: float, dtype: torch.dtype) -> None:
    x0 = _images(20, dtype=dtype, shape=(3, 32, 32))
    x = threat.project(x0, x0 + spread * torch.randn(x0.shape, dtype=dtype))
    assert x.dtype == dtype
    assert x.min() >= 0
    assert x.max() <= 1
    assert (threat.distance(x0, x) <= threat.eps * (1 + 1e-6)).all()
    assert threat.contains(x0, x).all()
    assert torch.allclose(threat.project(x0, x), x, atol=2e-7, rtol=0)


@pytest.mark.parametrize("threat", THREATS, ids=ids)
def test_no_point_of_the_set_is_nearer_than_the_projection(threat: Threat) -> None:
    """The variational inequality: ⟨x - z, u - z⟩ ≤ 0 for the projection z of x and every feasible u."""
    x0 = _images(30, dtype=torch.float64)
    x = x0 + torch.randn(x0.shape, dtype=torch.float64)
    z = threat.project(x0, x)
    for draw in range(20):
        u = threat.random_point(x0, torch.arange(30), seed=0, draw=draw)
        assert (((x - z) * (u - z)).flatten(1).sum(1) <= 1e-8).all()


@pytest.mark.parametrize("norm", NORMS)
def test_eps_zero_leaves_only_the_image(norm: str) -> None:
    threat, x0 = Threat(norm, 0.0), _images(4)
    assert torch.equal(threat.project(x0, x0 + 1), x0)
    assert torch.equal(threat.random_point(x0, torch.arange(4), seed=0, draw=0), x0)


@pytest.mark.parametrize("threat", THREATS, ids=ids)
def test_contains_rejects_what_is_outside(threat: Threat) -> None:
    x0 = torch.full((3, 3, 32, 32), 0.5)
    unit = torch.zeros_like(x0)
    unit[:, 0, 0, 0] = 1.0
    near = threat.project(x0, x0 + unit)
    out_of_box, broken = x0.clone(), x0.clone()
    out_of_box[:, 0, 0, 0] = 1 + 1e-6
    broken[:, 0, 0, 0] = math.nan
    assert threat.contains(x0, near).all()
    assert not Threat(threat.norm, threat.distance(x0, near)[0].item() - 3e-5).contains(x0, near).any()
    assert not threat.contains(x0, out_of_box).any()
    assert not threat.contains(x0, broken).any()


@pytest.mark.parametrize("threat", THREATS, ids=ids)
def test_memory_format_does_not_matter(threat: Threat) -> None:
    x0 = _images(4)
    x = x0 + 0.2 * torch.randn(x0.shape)
    last = [t.contiguous(memory_format=torch.channels_last) for t in (x0, x)]
    strided = [torch.stack([t, t], -1)[..., 0] for t in (x0, x)]
    for a, b in (last, strided):
        assert torch.allclose(threat.project(a, b), threat.project(x0, x), atol=1e-7, rtol=0)
        assert torch.allclose(threat.step(a, b, 0.1), threat.step(x0, x, 0.1), atol=1e-7, rtol=0)
        points = [threat.random_point(each, torch.arange(4), seed=1, draw=1) for each in (a, x0)]
        assert torch.equal(*points)


@pytest.mark.parametrize("threat", THREATS, ids=ids)
def test_a_step_is_as_long_as_it_should_be_and_the_steepest(threat: Threat) -> None:
    """Its product with the gradient is the dual norm: ‖g‖₁, ‖g‖₂, and for one coordinate of l1 ‖g‖∞."""
    x, g = torch.full((6, 3, 8, 8), 0.5), torch.randn(6, 3, 8, 8)
    d = threat.step(x, g, 0.25, sparsity=1e-9) - x
    dual = {"linf": 1.0, "l2": 2.0, "l1": math.inf}[threat.norm]
    assert torch.allclose(threat.distance(torch.zeros_like(d), d).float(), torch.full((6,), 0.25))
    assert torch.allclose((d * g).flatten(1).sum(1), 0.25 * torch.linalg.vector_norm(g.flatten(1), dual, dim=1))


def test_an_l1_step_is_shared_by_the_steepest_coordinates_with_room() -> None:
    g = torch.tensor([4.0, -3.0, 2.0, 1.0]).view(1, 1, 2, 2)
    x = torch.tensor([1.0, 0.1, 0.5, 0.5]).view(1, 1, 2, 2)  # the first cannot grow, the second shrink by 0.1 only
    moved = Threat("l1", 1.0).step(x, g, 0.6, sparsity=0.5) - x
    assert torch.allclose(moved.flatten(), torch.tensor([0.0, -0.1, 0.3, 0.2]))
    blocked = torch.ones_like(x)
    assert torch.equal(Threat("l1", 1.0).step(blocked, g.abs(), 0.6), blocked)


@pytest.mark.parametrize("sparsity", [0.01, 0.5, 1.0])
def test_an_l1_step_is_no_shorter_where_few_coordinates_are_free(sparsity: float) -> None:
    """As on a patch, where most of the gradient is masked."""
    generator = torch.Generator().manual_seed(0)
    x, g = torch.full((5, 3, 8, 8), 0.5), torch.zeros(5, 3, 8, 8)
    g[:, :, :2, :2] = torch.randn(5, 3, 2, 2, generator=generator)
    moved = Threat("l1", 4.0).step(x, g, 3.0, sparsity) - x
    assert torch.allclose(moved.abs().flatten(1).sum(1), torch.full((5,), 3.0))
    assert (moved * g >= 0).all()


def test_random_points_fill_the_ball_uniformly() -> None:
    """The share of points within radius r of a uniform d-ball is r^d; each linf coordinate is uniform."""
    x0 = torch.full((4000, 1, 1, 3), 0.5, dtype=torch.float64)
    index = torch.arange(4000)
    for norm in ("l2", "l1"):
        points = Threat(norm, 0.2).random_point(x0, index, seed=0, draw="p")
        radius = Threat(norm, 0.2).distance(x0, points) / 0.2
        assert stats.kstest((radius**3).numpy(), "uniform").pvalue > 1e-3
        assert ((points > x0).double().mean(0) - 0.5).abs().max() < 0.04
    offset = (Threat("linf", 0.2).random_point(x0, index, seed=0, draw="p") - x0) / 0.4 + 0.5
    assert stats.kstest(offset.flatten().numpy(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize(
    ("norm", "eps", "message"),
    [
        ("linf", -0.1, "threat.eps: input should be greater than or equal to 0"),
        ("linf", math.nan, "threat.eps: expected a finite number, got"),
        ("linf", math.inf, "threat.eps: expected a finite number, got"),
        ("linf", 8, "linf 8 is no bound; 8/255 meant"),
        ("linf", "8/0", "threat.eps: expected a number, got"),
        ("l-inf", 0.1, "unknown norm 'l-inf'; did you mean 'linf'"),
        ("l0", 0.1, "unknown norm 'l0'"),
    ],
)
def test_impossible_threats_are_refused(norm: str, eps: float, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        Threat(norm, eps)


@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("size", [32, 224])
def test_many_equal_roundings_do_not_add_up_past_the_radius(norm: str, size: int) -> None:
    """A flat image moved by the same amount everywhere rounds the same way in every pixel."""
    x0 = torch.full((1, 3, size, size), 0.7)
    x0[:, :, : size // 3] = 0.1
    for eps in torch.linspace(0.1, 5, 30).tolist():
        threat = Threat(norm, eps)
        assert threat.contains(x0, threat.project(x0, x0 + torch.ones_like(x0) * 0.2)).all()


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e-30])
def test_a_small_gradient_makes_no_small_step(scale: float) -> None:
    """A confident model's gradients vanish in float32, and their squares long before."""
    g, x = scale * torch.randn(4, 3, 8, 8), torch.full((4, 3, 8, 8), 0.5)
    for threat in THREATS:
        step = threat.step(x, g, 0.5) - x
        assert torch.allclose(threat.distance(torch.zeros_like(step), step).float(), torch.full((4,), 0.5))

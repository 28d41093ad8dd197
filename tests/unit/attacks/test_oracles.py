"""The closed forms that attacks are held against are what general solvers find."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize
from tests.conftest import MakeLinear
from tests.oracles import best_gain, distance, nearest, nearest_of_each_class
from torch import Tensor

from bastion.threat import Norm, Threat, project

NORMS: list[Norm] = ["linf", "l2", "l1"]


def _cases(seed: int = 0, rows: int = 12, size: int = 6) -> tuple[Tensor, Tensor]:
    """Weights and points, some of them on the faces of the box, some weights zero or equal."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, size, generator=generator, dtype=torch.float64)
    x = torch.rand(rows, size, generator=generator, dtype=torch.float64)
    x[0], x[1, :3], w[2, :2], w[3] = x[0].round(), 0.0, 0.0, w[3].sign()
    return w, x


def solved(norm: Norm, w: Tensor, x: Tensor, *, need: float | None = None, eps: float | None = None) -> float:
    """By a general solver: the shortest move that gains `need`, or the largest gain of a move of length eps."""
    weights, point = w.numpy(), x.numpy()
    n = len(point)
    box = [(-p, 1 - p) for p in point]
    if norm == "l2":
        start = 0.5 * (np.where(weights > 0, 1.0, 0.0) - point)
        if need is not None:
            plane = {"type": "eq", "fun": lambda d: weights @ d - need, "jac": lambda d: weights}
            found = minimize(
                lambda d: d @ d, start, jac=lambda d: 2 * d, bounds=box, constraints=plane, options={"ftol": 1e-14}
            )
            return float(np.sqrt(found.fun)) if found.success else np.inf
        ball = {"type": "ineq", "fun": lambda d: eps**2 - d @ d, "jac": lambda d: -2 * d}
        found = minimize(lambda d: -weights @ d, 0.1 * start, bounds=box, constraints=ball, options={"ftol": 1e-14})
        return float(-found.fun)
    # l1: δ = p - q; linf: |δ| ≤ t
    eye, zero = np.eye(n), np.zeros(n)
    if norm == "l1":
        cost, value = np.ones(2 * n), np.concatenate([weights, -weights])
        bounds = [(0, 1 - p) for p in point] + [(0, p) for p in point]
        below, limits = [], []
    else:
        cost, value, bounds = np.append(zero, 1.0), np.append(weights, 0.0), [*box, (0, None)]
        below = [*np.hstack([eye, -np.ones((n, 1))]), *np.hstack([-eye, -np.ones((n, 1))])]
        limits = [0.0] * (2 * n)
    if need is not None:
        found = linprog(cost, A_ub=below or None, b_ub=limits or None, A_eq=[value], b_eq=[need], bounds=bounds)
        return float(found.fun) if found.success else np.inf
    found = linprog(-value, A_ub=[*below, cost], b_ub=[*limits, eps], bounds=bounds)
    return float(-found.fun)


@pytest.mark.parametrize("norm", NORMS)
def test_the_distance_is_the_solvers(norm: Norm) -> None:
    w, x = _cases()
    most = (w.abs() * torch.where(w > 0, 1 - x, x)).sum(1)
    for share in (0.05, 0.4, 0.9):
        need = share * most
        expected = [solved(norm, *case, need=gain.item()) for *case, gain in zip(w, x, need, strict=True)]
        assert distance(norm, w, x, need).tolist() == pytest.approx(expected, abs=2e-6)
    assert distance(norm, w, x, 1.01 * most).isinf().all()
    assert (distance(norm, w, x, -most) == 0).all()


@pytest.mark.parametrize("norm", NORMS)
def test_the_gain_is_the_solvers_and_undoes_the_distance(norm: Norm) -> None:
    w, x = _cases(1)
    for eps in (0.0, 0.05, 0.3, 0.9):
        gain = best_gain(norm, w, x, eps)
        expected = [solved(norm, *case, eps=eps) for case in zip(w, x, strict=True)]
        assert gain.tolist() == pytest.approx(expected, abs=2e-6)
        reached = distance(norm, w, x, gain * (1 - 1e-12))
        assert (reached <= eps + 1e-9).all()
        filled = gain > (w.abs() * torch.where(w > 0, 1 - x, x)).sum(1) - 1e-9  # the whole box is in the ball
        assert torch.allclose(reached[~filled], torch.tensor(eps, dtype=torch.float64), atol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
def test_inside_the_box_the_distance_is_the_margin_over_the_dual_norm(make_linear: MakeLinear, norm: Norm) -> None:
    model, batch = make_linear(classes=5, interior=True)
    logits = model(batch.x)
    w = model.weight[None] - model.weight[batch.y][:, None]
    dual = {"linf": 1.0, "l2": 2.0, "l1": torch.inf}[norm]
    away = (logits.gather(1, batch.y[:, None]) - logits) / torch.linalg.vector_norm(w, dual, dim=2)
    away = away.detach().nan_to_num(nan=torch.inf)
    near = away < (0.4 if norm == "linf" else 0.3)  # farther moves may touch the box
    assert near.sum() > 8
    assert torch.allclose(nearest_of_each_class(norm, model, batch)[near], away[near], atol=1e-12)


@pytest.mark.parametrize("norm", NORMS)
def test_no_random_point_nearer_than_the_distance_is_wrong(make_linear: MakeLinear, norm: Norm) -> None:
    model, batch = make_linear(classes=4, n=6)
    radius = nearest(norm, model, batch)
    for draw in range(50):
        wild = Threat(norm, 1.0).random_point(batch.x, batch.index, seed=0, draw=draw)
        toward = batch.x + 100 * (wild - batch.x)
        assert torch.equal(model(project(norm, batch.x, toward, radius * (1 - 1e-9))).argmax(1), batch.y)

"""The shortest way to a hyperplane inside the box, in any norm: what FAB and DeepFool step along."""

from __future__ import annotations

import torch
from torch import Tensor

from bastion.attacks.threat import Norm, length

NEGLIGIBLE = 1e-8  # a coordinate of the normal this small does not help to reach the plane (l2 and l1)


DUAL: dict[Norm, Norm] = {"linf": "l1", "l2": "l2", "l1": "linf"}


def nearest_boundary(norm: Norm, gaps: Tensor, normals: Tensor) -> tuple[Tensor, Tensor]:
    """Of the boundaries to several classes, gaps (B, K) and their gradients (B, K, …), the one that is nearest."""
    rows, classes = gaps.shape
    size = length(DUAL[norm], normals.reshape(rows * classes, -1)).view(rows, classes)
    nearest = (gaps.abs() / (size + 1e-12)).argmin(1)
    row = torch.arange(rows, device=gaps.device)
    return gaps[row, nearest], normals[row, nearest].flatten(1)


def to_hyperplane(norm: Norm, x: Tensor, normal: Tensor, offset: Tensor) -> Tensor:
    """Per row, the shortest move d from x with ⟨normal, x + d⟩ = offset and x + d in [0, 1].

    x and normal are (B, D), offset (B,). Where the plane does not meet the box, the move to the corner nearest to it.
    """
    excess = (normal * x).sum(1) - offset
    slope = normal * torch.where(excess < 0, -1.0, 1.0).to(x.dtype)[:, None]  # go down along it, by |excess|
    weight = slope.abs()
    if norm != "linf":
        weight = torch.where(weight > NEGLIGIBLE, weight, 0)
    room = torch.where(slope > 0, x, 1 - x)
    moved = {"linf": _evenly, "l2": _along, "l1": _greedily}[norm](weight, room, excess.abs())
    return -slope.sign() * moved


def _evenly(weight: Tensor, room: Tensor, need: Tensor) -> Tensor:
    """linf: every coordinate by λ, or as far as it can."""
    level = _level(weight, room, need)
    return torch.where(weight > 0, torch.minimum(level, room), 0)


def _along(weight: Tensor, room: Tensor, need: Tensor) -> Tensor:
    """l2: every coordinate by λ times its weight, or as far as it can."""
    largest = weight.amax(1, keepdim=True).clamp(min=1e-30)
    weight, need = weight / largest, need / largest[:, 0]  # or the squares of small gradients vanish
    level = _level(weight.square(), torch.where(weight > 0, room / weight, 0), need)
    return torch.where(weight > 0, torch.minimum(level * weight, room), 0)  # ∞ · 0 is no number


def _level(rate: Tensor, cap: Tensor, need: Tensor) -> Tensor:
    """(B, 1) the smallest λ with Σ rate·min(λ, cap) = need; inf where there is none.

    The sum is concave and piecewise linear in λ, so Newton's steps from 0 climb to the root and end there.
    """
    level = torch.zeros_like(need)[:, None]
    while True:
        free = cap > level
        spent = torch.where(free, 0, rate * cap).sum(1, keepdim=True)
        slope = torch.where(free, rate, 0).sum(1, keepdim=True)
        climbed = torch.where(slope > 0, (need[:, None] - spent) / slope, torch.inf)
        rising = (climbed > level * (1 + 1e-6)) & (level < torch.inf)
        if not rising.any():
            return level
        level = torch.where(rising, climbed, level)


def _greedily(weight: Tensor, room: Tensor, need: Tensor) -> Tensor:
    """l1: the coordinates of largest weight as far as they can, the last one by what is left."""
    order = weight.argsort(dim=1, descending=True, stable=True)
    gain = (weight * room).gather(1, order).double()
    before = gain.cumsum(1) - gain
    share = ((need[:, None] - before) / gain.clamp(min=1e-300)).clamp(0, 1).to(room.dtype)
    return torch.zeros_like(room).scatter(1, order, share) * room * (weight > 0)

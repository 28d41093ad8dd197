"""Projection onto a hyperplane inside [0, 1], in any norm: the steps of FAB and DeepFool."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bastion.attacks.losses import likeliest_wrong, targeted_margin
from bastion.forward import input_gradient
from bastion.threat import Norm, headroom, length

NEGLIGIBLE = 1e-8  # l2 and l1: smaller coordinates of the normal, relative to the largest, count as zero
DUAL: dict[Norm, Norm] = {"linf": "l1", "l2": "l2", "l1": "linf"}


def nearest_boundary(norm: Norm, logits: Tensor, y: Tensor, x: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The class (B,) and normal (B, …) of the nearest of the linearised boundaries to the likeliest wrong classes.

    Classes are processed one after another, so that only one gradient is kept in memory.
    """
    candidates = likeliest_wrong(logits.detach(), y, classes).unbind(1)
    for number, target in enumerate(candidates):
        gap = targeted_margin(logits, y, target)
        gradient = input_gradient(gap, x, keep_graph=number + 1 < len(candidates))
        distance = gap.detach().abs() / (length(DUAL[norm], gradient.flatten(1)) + 1e-12)
        if number == 0:
            nearest, normal, least = target, gradient, distance
        nearer = distance < least
        nearest, least = torch.where(nearer, target, nearest), torch.where(nearer, distance, least)
        normal = torch.where(nearer.view(-1, 1, 1, 1), gradient, normal)
    return nearest, normal


def to_hyperplane(norm: Norm, x: Tensor, normal: Tensor, offset: Tensor) -> Tensor:
    """Per row, the shortest move d from x with ⟨normal, x + d⟩ = offset and x + d in [0, 1].

    x and normal are (B, D), offset (B,). If the plane does not meet the box: the move to the corner nearest to it.
    """
    excess = (normal * x).sum(1) - offset
    down = normal * torch.where(excess < 0, 1.0, -1.0).to(x.dtype)[:, None]  # direction towards the plane
    largest = down.abs().amax(1, keepdim=True).clamp(min=1e-30)
    weight, need = down.abs() / largest, excess.abs() / largest[:, 0]  # scaled, so that small squares do not underflow
    if norm != "linf":
        weight = F.threshold(weight, NEGLIGIBLE, 0.0)
    return down.sign() * {"linf": _linf_move, "l2": _l2_move, "l1": _l1_move}[norm](weight, headroom(x, down), need)


def _linf_move(weight: Tensor, space: Tensor, need: Tensor) -> Tensor:
    """Every coordinate moves by λ, or to the face of the box."""
    return torch.minimum(_level(weight, space, need), space)


def _l2_move(weight: Tensor, space: Tensor, need: Tensor) -> Tensor:
    """Every coordinate moves by λ times its weight, or to the face of the box."""
    level = _level(weight.square(), space / weight.clamp(min=1e-30), need)
    return torch.minimum(level * weight, space)


def _level(rate: Tensor, cap: Tensor, need: Tensor) -> Tensor:
    """(B, 1): the smallest λ with Σ rate·min(λ, cap) = need; the largest float if there is none.

    The sum is concave and piecewise linear in λ, so Newton's method from 0 reaches the root in finitely many steps.
    """
    level, most, gain = torch.zeros_like(need)[:, None], torch.finfo(need.dtype).max, rate * cap
    while True:
        free = cap > level
        spent, slope = (gain * ~free).sum(1, keepdim=True), (rate * free).sum(1, keepdim=True)
        climbed = torch.where(slope > 0, (need[:, None] - spent) / slope, most).clamp(max=most)
        rising = (climbed > level * (1 + 1e-6)) & (level < most)
        if not rising.any():
            return level
        level = torch.where(rising, climbed, level)


def _l1_move(weight: Tensor, space: Tensor, need: Tensor) -> Tensor:
    """The coordinates of largest weight move to the face of the box, the last of them by what is left."""
    order = weight.argsort(dim=1, descending=True, stable=True)
    gain = (weight * space).gather(1, order).double()
    before = gain.cumsum(1) - gain
    share = ((need[:, None] - before) / gain.clamp(min=1e-300)).clamp(0, 1).to(space.dtype)
    return torch.zeros_like(space).scatter(1, order, share) * space * (weight > 0)

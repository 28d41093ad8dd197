"""The shortest way to a hyperplane inside the box, in any norm: what FAB and DeepFool step along."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bastion.attacks.losses import likeliest_wrong, targeted_margin
from bastion.forward import input_gradient
from bastion.threat import Norm, headroom, length

NEGLIGIBLE = 1e-8  # of the largest: a coordinate of the normal this small does not help to reach the plane (l2 and l1)
DUAL: dict[Norm, Norm] = {"linf": "l1", "l2": "l2", "l1": "linf"}


def nearest_boundary(norm: Norm, logits: Tensor, y: Tensor, x: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Of the linearised boundaries to the likeliest wrong classes, the class (B,) and the normal (B, …) of the nearest.

    One after another: of a thousand classes, only the gradient of the nearest is held.
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

    x and normal are (B, D), offset (B,). Where the plane does not meet the box, the move to the corner nearest to it.
    """
    excess = (normal * x).sum(1) - offset
    down = normal * torch.where(excess < 0, 1.0, -1.0).to(x.dtype)[:, None]  # the way to the plane, |excess| away
    largest = down.abs().amax(1, keepdim=True).clamp(min=1e-30)
    weight, need = down.abs() / largest, excess.abs() / largest[:, 0]  # or the squares of small gradients vanish
    if norm != "linf":
        weight = F.threshold(weight, NEGLIGIBLE, 0.0)
    return down.sign() * {"linf": _evenly, "l2": _along, "l1": _greedily}[norm](weight, headroom(x, down), need)


def _evenly(weight: Tensor, space: Tensor, need: Tensor) -> Tensor:
    """linf: every coordinate by λ, or as far as it can."""
    return torch.minimum(_level(weight, space, need), space)


def _along(weight: Tensor, space: Tensor, need: Tensor) -> Tensor:
    """l2: every coordinate by λ times its weight, or as far as it can."""
    level = _level(weight.square(), space / weight.clamp(min=1e-30), need)
    return torch.minimum(level * weight, space)


def _level(rate: Tensor, cap: Tensor, need: Tensor) -> Tensor:
    """(B, 1) the smallest λ with Σ rate·min(λ, cap) = need; the largest number where there is none.

    The sum is concave and piecewise linear in λ, so Newton's steps from 0 climb to the root and end there.
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


def _greedily(weight: Tensor, space: Tensor, need: Tensor) -> Tensor:
    """l1: the coordinates of largest weight as far as they can, the last one by what is left."""
    order = weight.argsort(dim=1, descending=True, stable=True)
    gain = (weight * space).gather(1, order).double()
    before = gain.cumsum(1) - gain
    share = ((need[:, None] - before) / gain.clamp(min=1e-300)).clamp(0, 1).to(space.dtype)
    return torch.zeros_like(space).scatter(1, order, share) * space * (weight > 0)

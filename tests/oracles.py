"""What is true of a linear classifier in the pixel box, in closed form: how near the nearest fooling point is, and how
far a margin can fall inside a ball. By sorted breakpoints in float64; attacks are held against it."""

from __future__ import annotations

import torch
from torch import Tensor

from bastion.threat import Norm
from bastion.types import Batch
from tests.conftest import Linear


def nearest(norm: Norm, model: Linear, batch: Batch) -> Tensor:
    """(B,) the distance of the nearest point of the box that gets a wrong class; inf if there is none, 0 if already."""
    return nearest_of_each_class(norm, model, batch).amin(1)


def nearest_of_each_class(norm: Norm, model: Linear, batch: Batch) -> Tensor:
    """(B, K) the distance of the nearest point where class k has at least the logit of the right one; inf at y."""
    with torch.no_grad():
        logits = model(batch.x).double()
    rows = torch.arange(len(batch.x))
    columns = []
    for k in range(logits.shape[1]):
        w = (model.weight[k] - model.weight[batch.y]).detach().double()
        away = distance(norm, w, batch.x.flatten(1).double(), logits[rows, batch.y] - logits[:, k])
        columns.append(torch.where(batch.y == k, torch.inf, away))
    return torch.stack(columns, 1)


def distance(norm: Norm, w: Tensor, x: Tensor, need: Tensor) -> Tensor:
    """(B,) the length of the shortest move inside the box that raises ⟨w, x⟩ by `need`; inf if there is none."""
    size, room = _size_and_room(w, x)
    if norm == "linf":
        away = _level(size, room, need)
    elif norm == "l2":
        level = _level(size.square(), _over(room, size), need)[:, None]
        away = torch.minimum(torch.where(size > 0, level * size, 0), room).norm(dim=1)
    else:  # the rooms of the largest weights first, each unit of which is worth its weight
        order = size.argsort(1, descending=True)
        away = _first(size.gather(1, order), room.gather(1, order), need)
    reachable = (size * room).sum(1) >= need
    return torch.where(need <= 0, 0.0, torch.where(reachable, away, torch.inf))


def best_gain(norm: Norm, w: Tensor, x: Tensor, eps: float) -> Tensor:
    """(B,) the most that a move of length eps inside the box can raise ⟨w, x⟩."""
    size, room = _size_and_room(w.flatten(1).double(), x.flatten(1).double())
    if norm == "linf":
        return (size * room.clamp(max=eps)).sum(1)
    if norm == "l2":  # δ = min(λ|w|, room) with Σ min(λ²w², room²) = eps²
        square = _level(size.square(), _over(room, size).square(), torch.full_like(size[:, 0], eps**2))[:, None]
        return (size * torch.minimum(torch.where(size > 0, square.sqrt() * size, 0), room)).sum(1)
    order = size.argsort(1, descending=True)
    size, room = size.gather(1, order), room.gather(1, order)
    before = room.cumsum(1) - room
    return (size * torch.minimum(room, (eps - before).clamp(min=0))).sum(1)


def _size_and_room(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """How much each coordinate is worth, and how far it can go in the direction that counts."""
    return w.abs(), torch.where(w > 0, 1 - x, x)


def _over(room: Tensor, size: Tensor) -> Tensor:
    return torch.where(size > 0, room / size.clamp(min=1e-300), 0)


def _level(rate: Tensor, cap: Tensor, need: Tensor) -> Tensor:
    """(B,) the λ with Σ rate·min(λ, cap) = need; inf if there is none."""
    cap, order = cap.sort(dim=1)
    rate = rate.gather(1, order)
    full = (rate * cap).cumsum(1)
    left = rate.sum(1, keepdim=True) - rate.cumsum(1)  # the rate beyond each breakpoint
    short = full + cap * left < need[:, None] * (1 - 1e-14)
    at = short.sum(1, keepdim=True)  # the first breakpoint that is enough
    inside = at.clamp(max=cap.shape[1] - 1)
    spent = (full - rate * cap).gather(1, inside)
    slope = (left + rate).gather(1, inside)
    level = (need[:, None] - spent) / slope.clamp(min=1e-300)
    return torch.where(at == cap.shape[1], torch.inf, level)[:, 0]


def _first(size: Tensor, room: Tensor, need: Tensor) -> Tensor:
    """(B,) how much room is used when it is filled in this order until `need` is met."""
    gain = size * room
    rest = need[:, None] - (gain.cumsum(1) - gain)
    return torch.minimum(room, rest.clamp(min=0) / size.clamp(min=1e-300)).sum(1)

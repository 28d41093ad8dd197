"""The threat model: an Lp ball around an image, intersected with the pixel box [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator
from torch import Tensor

from bastion import rng
from bastion.errors import BastionError
from bastion.settings import NotNegative, SettingsError, settings


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


Norm = Annotated[Literal["linf", "l2", "l1"], BeforeValidator(_lower)]  # "Linf" too, as RobustBench writes it


@settings(kw_only=False)
class Threat:
    """All images within `eps` of x0 in the given norm, with pixels in [0, 1]. `eps` is in pixel units."""

    norm: Norm
    eps: NotNegative

    def __post_init__(self) -> None:
        if self.norm == "linf" and self.eps > 1:
            raise SettingsError(
                "threat", ["eps"], f"pixels are in [0, 1], so linf {self.eps:g} is no bound; {self.eps:g}/255 meant?"
            )

    def check_bounds(self, shape: Sequence[int]) -> None:
        """Raise if no two images of this shape (C, H, W) are further apart than eps."""
        widest = math.prod(shape) if self.norm == "l1" else math.prod(shape) ** (1 / 2)
        if self.norm != "linf" and self.eps > widest:
            raise BastionError(
                f"eps: no two images of {' x '.join(map(str, shape))} pixels are further than {widest:.4g} apart in "
                f"{self.norm}, so {self.eps:g} is no bound; {self.eps:g}/255 meant?"
            )

    def scaled(self, factor: float) -> Threat:
        return replace(self, eps=self.eps * factor)

    def project(self, x0: Tensor, x: Tensor) -> Tensor:
        """Return the point of the set nearest to x in Euclidean distance (for linf in its own norm too)."""
        return project(self.norm, x0, x, self.eps)

    def distance(self, x0: Tensor, x: Tensor) -> Tensor:
        """Return (B,) float64: the distance of each x from its x0 in this norm."""
        return length(self.norm, x.double() - x0.double())

    def contains(self, x0: Tensor, x: Tensor) -> Tensor:
        """Return (B,) bool: inside the box exactly, and the ball up to 1e-6 (for l1 times its radius, if above 1)."""
        slack = 1e-6 * max(1.0, self.eps) if self.norm == "l1" else 1e-6
        in_box = ((x >= 0) & (x <= 1)).flatten(1).all(1)
        return in_box & (self.distance(x0, x) <= self.eps + slack)

    def step(self, x: Tensor, gradient: Tensor, size: float, sparsity: float = 0.01) -> Tensor:
        """Move x by `size` in the direction that raises a linear loss most; not yet projected.

        For l1 that is one coordinate after another, the steepest first, each as far as the box allows; a fraction
        `sparsity` of them shares the step, so that fewer steps are enough.
        """
        if self.norm != "l1":
            return x + size * steepest(self.norm, gradient)
        flat, pixels = gradient.flatten(1), x.flatten(1)
        slope, order = flat.abs().sort(dim=1, descending=True, stable=True)
        space = headroom(pixels, flat).gather(1, order)
        free = ((slope > 0) & (space > 0)).sum(1, keepdim=True)
        most = size / free.clamp(1, max(1, round(sparsity * flat.shape[1])))
        part = torch.where(slope > 0, torch.minimum(space, most), 0).double()
        part = torch.minimum(part, (size - (part.cumsum(1) - part)).clamp(min=0)).to(x.dtype)
        return (pixels + flat.sign() * torch.zeros_like(part).scatter(1, order, part)).view(x.shape)

    def random_point(self, x0: Tensor, index: Tensor, *, seed: int, draw: rng.Draw) -> Tensor:
        """Return a uniform point of the ball, from each example's own stream, clamped to the box."""
        shape, size = x0.shape[1:], math.prod(x0.shape[1:])
        if self.norm == "linf":
            offset = rng.uniform(seed, index, draw, shape, -self.eps, self.eps, dtype=x0.dtype)
            return (x0 + offset).clamp(0, 1)
        if self.norm == "l2":
            # Two more coordinates on the sphere, dropped afterwards, make the rest uniform in the ball.
            points = rng.normal(seed, index, draw, (size + 2,), dtype=x0.dtype)
            unit = (points / length("l2", points)[:, None])[:, :size]
        else:
            # Exponential gaps with one to spare are uniform in the simplex; random signs make it the l1 ball.
            draws = rng.uniform(seed, index, draw, (size + 1,), -1, 1, dtype=torch.float64)
            gaps = -torch.log1p(-draws.abs())
            unit = (draws.sign() * gaps / gaps.sum(1, keepdim=True))[:, :size].to(x0.dtype)
        return (x0 + self.eps * unit.view(x0.shape)).clamp(0, 1)


def steepest(norm: Norm, gradient: Tensor) -> Tensor:
    """Return the offset of unit length in linf or l2 that raises a linear loss most."""
    if norm == "linf":
        return gradient.sign()
    flat = gradient.flatten(1)
    flat = flat / flat.abs().amax(1, keepdim=True).clamp(min=1e-38)  # so that squares of small values do not underflow
    return (flat / (length("l2", flat)[:, None] + 1e-12)).view(gradient.shape)


def length(norm: Norm, offset: Tensor) -> Tensor:
    """Return (B,): the length of each offset."""
    flat = offset.flatten(1)
    if norm == "l2":
        lengths: Tensor = torch.linalg.vector_norm(flat, dim=1)
        return lengths
    return flat.abs().amax(1) if norm == "linf" else flat.abs().sum(1)  # many times faster than `vector_norm`


def at_size(length: float, x: Tensor) -> float:
    """Scale an l2 length for images of 224×224 to images like x, in proportion to √pixels."""
    return length * math.sqrt(math.prod(x.shape[2:])) / 224


def headroom(x: Tensor, direction: Tensor) -> Tensor:
    """Return how far each pixel can move: up to 1 where the direction is positive, down to 0 elsewhere."""
    return (x - (direction > 0).to(x.dtype)).abs()


SAFETY = 1 - 1e-7  # factor of a radius, so that rounding does not leave the ball
Radius = float | Tensor  # one for all examples, or (B,)


def project(norm: Norm, x0: Tensor, x: Tensor, eps: Radius) -> Tensor:
    """Project x onto the ball of radius eps around x0, intersected with the box."""
    radius = eps.view(-1, 1) if isinstance(eps, Tensor) else eps
    if norm == "linf":
        radius = radius.view(-1, 1, 1, 1).to(x.dtype) if isinstance(radius, Tensor) else radius
        return torch.clamp(x, x0 - radius, x0 + radius).clamp_(0, 1)
    inside = project_l2 if norm == "l2" else project_l1
    return inside(x0.flatten(1), x.flatten(1), radius).view(x.shape)


def project_approx(norm: Norm, x0: Tensor, x: Tensor, eps: Radius) -> Tensor:
    """Return a point of the set near x: the projection, but for l2 the cheaper scaling and clipping."""
    if norm != "l2":
        return project(norm, x0, x, eps)
    offset = x - x0
    size = torch.linalg.vector_norm(offset.flatten(1), dim=1, dtype=torch.float64)
    scale = (SAFETY * eps / (size + 1e-12)).clamp(max=1).to(x.dtype)
    moved: Tensor = (x0 + scale.view(-1, 1, 1, 1) * offset).clamp_(0, 1)
    return moved


def project_l2(x0: Tensor, x: Tensor, eps: Radius) -> Tensor:
    """Project rows of x onto the l2 ball of radius eps around rows of x0, intersected with the box.

    The projection is clip(s·v) with v = x - x0 and the one s in [0, 1] that gives it length eps. Its squared length
    g(t), t = s², is concave and piecewise linear, so Newton's method from t = 0 rises to the root and is never
    outside; its first step is the usual rescaling.
    """
    v = (x - x0).double()
    cap = headroom(x0, v).double()
    square, cap_square = v.square(), cap.square()
    t = torch.zeros(len(x), 1, dtype=v.dtype, device=x.device)
    while True:
        free = t * square < cap_square
        rest = eps**2 - (cap_square * ~free).sum(1, keepdim=True)
        climbed = (rest / (square * free).sum(1, keepdim=True).clamp(min=1e-300)).clamp(max=1)
        rising = climbed > t * (1 + 1e-12)
        if not rising.any():
            break
        t = torch.where(rising, climbed, t)  # converged rows stay, so that results do not depend on the others
    return _inwards(x0, v.sign() * torch.minimum(t.sqrt() * v.abs(), cap))


def project_l1(x0: Tensor, x: Tensor, eps: Radius) -> Tensor:
    """Project rows of x onto the l1 ball of radius eps around rows of x0, intersected with the box; exact.

    The projection is z(λ) = sign(v)·clip(|v| - λ, 0, cap), where S(λ) = ‖z(λ)‖₁, which falls piecewise linearly,
    equals eps. In float64: in float32 the sum of thousands of pieces overshoots the radius.
    """
    v = (x - x0).double()
    cap = headroom(x0, v).double()
    size = v.abs()
    z = torch.minimum(size, cap)
    radius = torch.as_tensor(eps, dtype=v.dtype, device=v.device).expand(len(v), 1)
    outside = z.sum(1) > radius[:, 0]
    z[radius[:, 0] == 0] = 0
    outside &= radius[:, 0] > 0
    if outside.any():
        shrunk = size[outside] - _threshold(size[outside], cap[outside], radius[outside])
        z[outside] = torch.minimum(shrunk.clamp(min=0), cap[outside])
    return _inwards(x0, v.sign() * z)


def _threshold(size: Tensor, cap: Tensor, eps: Tensor) -> Tensor:
    """Return (B, 1): the λ with S(λ) = eps, for rows with S(0) > eps.

    Newton's steps hit the root once they reach its segment; where one leaves the bracket, the bracket is halved.
    """
    low, high = torch.zeros_like(eps), size.amax(1, keepdim=True)
    level = low
    while True:
        rest = size - level
        excess = torch.minimum(rest, cap).clamp_(min=0).sum(1, keepdim=True) - eps
        shrinking = ((rest > 0) & (rest <= cap)).sum(1, keepdim=True)  # just right of the level
        newton = level + excess / shrinking
        low, high = torch.where(excess > 0, level, low), torch.where(excess > 0, high, level)
        arrived = (excess.abs() <= 1e-12 * eps) | (newton == level)
        following = torch.where((newton > low) & (newton < high), newton, (low + high) / 2)
        following = torch.where(arrived, level, following)
        if (following == level).all():
            return level
        level = following


def _inwards(x0: Tensor, offset: Tensor) -> Tensor:
    """Return x0 + offset in x0's precision, rounded towards x0, so that roundings cannot add up past the radius."""
    x = (x0.double() + offset).to(x0.dtype)
    too_far = (x.double() - x0.double()).abs() > offset.abs()
    return torch.where(too_far, torch.nextafter(x, x0), x).clamp(0, 1)

"""Largest singular values of linear maps that are given by their products, one map for each example of a batch.

Golub-Kahan-Lanczos bidiagonalisation (Golub and Kahan 1965) with full reorthogonalisation and thick restarts (Baglama
and Reichel 2005). A product is computed for all examples of the batch at once; each example has its own vectors, and
its result does not depend on the others. A search finds a multiple singular value only once, so further searches,
orthogonal to what was found, look for its other copies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

CHECK_EVERY = 4  # steps between checks of convergence
ROUNDING = 32  # smaller values, in machine epsilons of the largest, count as zero
ROUGH = 0.1  # relative residual that is enough for a value below all wanted ones
MARGIN = 0.9  # of the tolerance, so that rounding does not lift a residual above it


class Operator(Protocol):
    """A linear map from `inputs` to `outputs` dimensions for each example of a batch."""

    inputs: int
    outputs: int
    noise: float  # length of the error that rounding makes in a product with a unit vector, at least

    def apply(self, v: Tensor) -> Tensor:
        """(B, inputs) to (B, outputs)."""
        ...

    def transpose(self, u: Tensor) -> Tensor:
        """(B, outputs) to (B, inputs)."""
        ...


class SingularValues(NamedTuple):
    """The largest singular values of each example's map."""

    values: Tensor  # (B, k) float64, the largest first; 0 if the map has fewer, NaN if it is not finite
    # (B, k) ‖Aᵀu − σv‖ / σ₁, of several values also ‖Av − σu‖ / σ₁ if that is larger: relative to σ₁, each value is at
    # most this far from a singular value.
    residuals: Tensor
    products: Tensor  # (B,) number of products with A and with Aᵀ


class Triplets(NamedTuple):
    """Approximate singular values and vectors; zeros if there are fewer than k."""

    values: Tensor  # (B, k) float64, the largest first
    left: Tensor  # (B, k, outputs)
    right: Tensor  # (B, k, inputs)

    def merged(self, others: Triplets) -> Triplets:
        """The k largest of both."""
        both = [torch.cat(parts, dim=1) for parts in zip(self, others, strict=True)]
        order = both[0].argsort(dim=1, descending=True, stable=True)[:, : self.values.shape[1]]
        rows = torch.arange(len(order), device=order.device)[:, None]
        return Triplets(*(part[rows, order] for part in both))

    def where(self, rows: Tensor, others: Triplets) -> Triplets:
        """These for the rows of a mask, the others elsewhere."""
        return Triplets(
            *(
                torch.where(rows.view(-1, *[1] * (own.ndim - 1)), own, other)
                for own, other in zip(self, others, strict=True)
            )
        )


def largest(
    operator: Operator,
    start: Callable[[int], Tensor],
    *,
    top: int = 1,
    tolerance: float = 1e-4,
    basis: int = 64,
    limit: int = 1000,
) -> SingularValues:
    """The `top` largest singular values of each example's map, with residuals below the tolerance.

    `start(i)` gives random start vectors (B, inputs), different ones for each i. At most `basis` vectors are kept on
    each side. A search ends without having converged after `limit` products, or if what is left is the operator's
    noise.
    """
    search = partial(_search, operator, tolerance=tolerance, basis=basis, limit=limit)
    found, products = search(start(0), top=top)
    open_rows = torch.full_like(products, top > 1, dtype=torch.bool)
    for number in range(1, top + 1):
        if not open_rows.any():
            break
        missed, spent = search(start(number), top=1, locked=found, done=~open_rows)
        products = products + spent
        least = found.values[:, -1] * (1 + tolerance) + rounding(missed.left) * found.values[:, 0]
        open_rows = open_rows & (missed.values[:, 0] > least)
        found = found.merged(missed).where(open_rows, found)
    residuals, checks = _residuals(operator, found)
    return SingularValues(found.values, residuals, products + checks)


def _search(
    operator: Operator,
    start: Tensor,
    *,
    top: int,
    tolerance: float,
    basis: int,
    limit: int,
    locked: Triplets | None = None,
    done: Tensor | None = None,
) -> tuple[Triplets, Tensor]:
    """The `top` largest singular values orthogonal to the locked ones, and the products spent on each example not done.

    If there are locked values, a value that will stay below all of them is not computed to the tolerance.
    """
    krylov = _Krylov(operator, start, min(basis, 1 + min(operator.inputs, operator.outputs)), locked)
    done = torch.zeros(len(start), dtype=torch.bool, device=start.device) if done is None else done
    products = torch.zeros(len(start), dtype=torch.int64, device=start.device)
    found = Triplets(*(_padded(part[:, :0], top) for part in (krylov.projected[:, 0], krylov.left, krylov.right)))
    for step in range(1, limit // 2 + 1):
        krylov.extend()
        products += 2 * ~done
        last = step == limit // 2
        if not (krylov.is_full or last or krylov.count % CHECK_EVERY == 0):
            continue
        values, errors = krylov.decompose(top)
        enough = (MARGIN * tolerance * values[:, :1]).clamp(min=operator.noise)
        arrived = (errors <= enough).all(1) | values.isnan().any(1)
        if locked is not None:
            rough = errors[:, 0] <= ROUGH * values[:, 0]
            arrived |= rough & (values[:, 0] + errors[:, 0] < locked.values[:, -1])
        found = krylov.triplets(top).where((arrived | last) & ~done, found)
        done = done | arrived
        if done.all():
            break
        if krylov.is_full:
            krylov.restart(top)
    return found, products


class _Krylov:
    """Krylov bases of each example: A V = U T, Aᵀ U = V Tᵀ + β v eᵀ; rows of left and right are orthonormal or 0."""

    def __init__(self, operator: Operator, start: Tensor, size: int, locked: Triplets | None) -> None:
        b = len(start)
        self.operator, self.locked, self.size, self.count = operator, locked, size, 0
        self.left = start.new_zeros(b, size, operator.outputs)  # U
        self.right = start.new_zeros(b, size + 1, operator.inputs)  # V, and v after the last of them
        self.projected = start.new_zeros(b, size, size, dtype=torch.float64)  # T, upper triangular
        self.beta = start.new_zeros(b, dtype=torch.float64)
        # A lower bound of the map's largest singular value, to tell zero from rounding when the largest are locked.
        self.scale = torch.zeros_like(self.beta) if locked is None else locked.values[:, 0]
        self.right[:, 0] = _unit(self._free(start, "right"), torch.zeros_like(self.beta))[0]

    @property
    def is_full(self) -> bool:
        return self.count == self.size

    def extend(self) -> None:
        """Add a vector to each basis."""
        j = self.count
        u = self.operator.apply(self.right[:, j])
        self.scale = torch.maximum(self.scale, torch.linalg.vector_norm(u, dim=1).double())
        u, components = _orthogonal(self._free(u, "left"), self.left[:, :j])
        floor = rounding(u) * self.scale
        self.left[:, j], alpha = _unit(u, floor)
        self.projected[:, :j, j], self.projected[:, j, j] = components.double(), alpha
        v = self.operator.transpose(self.left[:, j])
        v, _ = _orthogonal(self._free(v, "right"), self.right[:, : j + 1])
        self.right[:, j + 1], self.beta = _unit(v, floor)
        self.count += 1

    def _free(self, vector: Tensor, side: str) -> Tensor:
        """The part of the vector that is orthogonal to the locked singular vectors."""
        return vector if self.locked is None else _orthogonal(vector, getattr(self.locked, side))[0]

    def decompose(self, top: int) -> tuple[Tensor, Tensor]:
        """(B, top): singular values of T, and upper bounds of their distance to one of A; NaN if T is not finite."""
        projected = self.projected[:, : self.count, : self.count]
        self.svd = torch.linalg.svd(projected.nan_to_num())
        self.svd.S[~projected.isfinite().all((1, 2))] = torch.nan
        errors = self.beta[:, None].expand(-1, top).clone()  # missing values count as 0, which is exact if β = 0
        shown = min(top, self.count)
        errors[:, :shown] *= self.svd.U[:, -1, :shown].abs()
        return _padded(self.svd.S[:, :top], top), errors

    def triplets(self, top: int) -> Triplets:
        """Singular values and vectors of the last decomposition."""
        left, right = self._singular_vectors(top)
        return Triplets(*(_padded(part, top) for part in (self.svd.S[:, :top], left, right)))

    def _singular_vectors(self, count: int) -> tuple[Tensor, Tensor]:
        """(B, count, outputs) and (B, count, inputs)"""
        left = self.svd.U[:, :, :count].mT.to(self.left.dtype) @ self.left[:, : self.count]
        right = self.svd.Vh[:, :count].to(self.right.dtype) @ self.right[:, : self.count]
        return left, right

    def restart(self, top: int) -> None:
        """Thick restart: keep the best approximate singular vectors, and the last vector of the basis."""
        keep = top + (self.size - top) // 3
        last = self.right[:, self.count].clone()
        self.left[:, :keep], self.right[:, :keep] = self._singular_vectors(keep)
        self.right[:, keep] = last
        self.projected.zero_()
        self.projected[:, range(keep), range(keep)] = self.svd.S[:, :keep]
        self.count = keep


def _residuals(operator: Operator, found: Triplets) -> tuple[Tensor, int]:
    """(B, k): the residuals, computed by products instead of the recurrence; and how many products.

    Av = σu holds by construction, unless u was found orthogonally to singular vectors that are not exact themselves.
    """
    lengths = []
    several = found.values.shape[1] > 1
    for value, u, v in zip(*(part.unbind(1) for part in found), strict=True):
        away = [operator.transpose(u) - value[:, None].to(v.dtype) * v]
        if several:
            away.append(operator.apply(v) - value[:, None].to(u.dtype) * u)
        lengths.append(torch.stack([torch.linalg.vector_norm(each, dim=1).double() for each in away]).amax(0))
    relative = torch.stack(lengths, dim=1) / found.values[:, :1].clamp(min=torch.finfo(torch.float64).tiny)
    return relative, len(lengths) * (1 + several)


def _orthogonal(vector: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The part of each vector (B, n) that is orthogonal to the rows of its basis (B, j, n), and its components (B, j).

    Gram-Schmidt is run twice, which is enough (Kahan); after one run, rounding errors would grow from vector to vector.
    """
    components = vector.new_zeros(basis.shape[:2])
    for _ in range(2):
        part = torch.bmm(basis, vector[:, :, None])
        vector = vector - torch.bmm(part.mT, basis)[:, 0]
        components += part[:, :, 0]
    return vector, components


def _unit(vector: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """The vectors (B, n) scaled to norm 1, and their norms (B,) float64; both zero if the norm is below the floor."""
    length = torch.linalg.vector_norm(vector, dim=1).double()
    length = torch.where(length <= floor, 0.0, length)
    return vector * torch.where(length == 0, 0.0, 1 / length)[:, None].to(vector.dtype), length


def rounding(like: Tensor) -> float:
    """Rounding error relative to the largest singular value, in the precision of `like`."""
    return ROUNDING * torch.finfo(like.dtype).eps


def _padded(part: Tensor, count: int) -> Tensor:
    """(B, count, …): padded with zeros."""
    missing = part.new_zeros(len(part), count - part.shape[1], *part.shape[2:])
    return torch.cat([part, missing], dim=1)

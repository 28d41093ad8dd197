"""Extreme eigenvalues and the trace of a symmetric matrix that is given by its products with vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 16  # smaller values, in machine epsilons of the largest, count as zero
Product = Callable[[Tensor], Tensor]  # (P,) -> (P,)


class Eigenvalues(NamedTuple):
    """Ritz values, largest first, and upper bounds of their distance to an eigenvalue."""

    values: Tensor
    residuals: Tensor
    converged: bool = False  # the wanted ones


def lanczos(product: Product, start: Tensor, *, wanted: int, iterations: int, tolerance: float) -> Eigenvalues:
    """The `wanted` largest eigenvalues by Lanczos with full reorthogonalisation.

    It stops when their residuals are below `tolerance` times the largest absolute value, or after `iterations`
    products. The basis takes the memory of `iterations` vectors. Of a multiple eigenvalue one copy is sure to be found,
    the others only as far as rounding brings them in.
    """
    basis = start.new_zeros(iterations, len(start))
    vector = start / torch.linalg.vector_norm(start)
    diagonal, beside = list[float](), list[float]()
    for step in range(iterations):
        basis[step] = vector
        vector = product(vector)
        diagonal.append(torch.dot(vector.double(), basis[step].double()).item())
        for _ in range(2):  # twice, because of rounding
            vector = vector - basis[: step + 1].T @ (basis[: step + 1] @ vector)
        beside.append(torch.linalg.vector_norm(vector).item())
        found = _ritz(diagonal, beside)
        scale = found.values.abs().max().item() or 1.0
        rounding = ROUNDING * torch.finfo(start.dtype).eps * scale
        exhausted = beside[-1] <= rounding  # the basis spans an invariant subspace
        converged = exhausted or bool(step + 1 > wanted and found.residuals[:wanted].max() <= tolerance * scale)
        if converged:
            break
        vector = vector / beside[-1]
    return Eigenvalues(found.values, found.residuals.clamp(min=rounding), converged)


def _ritz(diagonal: list[float], beside: list[float]) -> Eigenvalues:
    off = torch.tensor(beside[:-1], dtype=torch.float64)
    tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(tridiagonal)
    return Eigenvalues(values.flip(0), (beside[-1] * vectors[-1].abs()).flip(0))


def hutchinson(product: Product, signs: Iterable[Tensor]) -> tuple[float, float]:
    """Hutchinson's estimate of the trace, the mean of z·Hz over random signs z, and its standard error."""
    values = torch.tensor([torch.dot(z.double(), product(z).double()).item() for z in signs], dtype=torch.float64)
    error = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return values.mean().item(), error

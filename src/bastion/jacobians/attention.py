"""The Jacobian of self-attention, and a bound of its Lipschitz constant on bounded tokens (Wang and Ruan 2022, Th. 1).

For one head with scores sᵢⱼ = zᵢᵀA zⱼ + cᵀzⱼ, P = softmax(s) and f(z) = Pz the Jacobian has the blocks

    Jᵢₖ = Pᵢₖ I + Pᵢₖ (zₖ − μᵢ)(Aᵀzᵢ + c)ᵀ + δᵢₖ Σᵢ Aᵀ,   μᵢ = Σⱼ Pᵢⱼ zⱼ,   Σᵢ = Σⱼ Pᵢⱼ zⱼzⱼᵀ − μᵢμᵢᵀ.

For tokens of dimension 1, c = 0 and A = a, this is a{diag(z) P diag(z) − diag(μ) diag(z) P + diag(σ²)} + P; Eq. 5 of
the paper has P on the other side of the middle term. If no token has a norm above R, the norm of the first term is at
most √N, of the second √N R (R‖A‖ + ‖c‖) by the Cauchy-Schwarz inequality, of the third R²‖A‖: on a bounded domain
attention is Lipschitz, with a bound that grows as the square of the radius.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def head_jacobian(z: Tensor, a: Tensor, c: Tensor | None = None) -> Tensor:
    """(N·D, N·D): the Jacobian of f(z) = softmax(z A zᵀ + 1 (zc)ᵀ) z at tokens (N, D), in closed form."""
    n, d = z.shape
    c = z.new_zeros(d) if c is None else c
    p = (z @ a @ z.T + z @ c).softmax(1)
    mean = p @ z
    away = z[None] - mean[:, None]  # (N, N, D): zₖ − μᵢ
    covariance = torch.einsum("ij,ijd,ije->ide", p, away, away)
    moved = torch.einsum("ik,ikd,ie->idke", p, away, z @ a + c)
    kept = torch.einsum("ik,de->idke", p, torch.eye(d, dtype=z.dtype, device=z.device))
    own = torch.einsum("ik,ide->idke", torch.eye(n, dtype=z.dtype, device=z.device), covariance @ a.T)
    return (kept + moved + own).reshape(n * d, n * d)


class Heads(NamedTuple):
    """Weights of multi-head self-attention of width D, for each head."""

    a: Tensor  # (H, D, D): scores zᵢᵀA zⱼ …
    c: Tensor  # (H, D): … + cᵀzⱼ; terms that depend on zᵢ only cancel in softmax
    v: Tensor  # (H, d, D)
    out: Tensor  # (D, H·d)

    @classmethod
    def of(cls, q: Tensor, q_bias: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> Heads:
        """From projections (H, d, D) to queries, keys and values, and the bias (H, d) of the queries."""
        return cls(scale * q.mT @ k, scale * (q_bias[:, None] @ k)[:, 0], v, out)

    def upper_bound(self, radius: Tensor, tokens: int) -> Tensor:
        """(R,): upper bounds of the Lipschitz constant on this many tokens with norms of at most `radius` (R,)."""
        size, shift, value = _norm(self.a), torch.linalg.vector_norm(self.c, dim=1), _norm(self.v)  # (H,)
        r = radius[:, None]
        single = tokens**0.5 * (1 + r * (r * size + shift)) + r**2 * size
        bound: Tensor = _norm(self.out) * torch.linalg.vector_norm(value * single, dim=1)
        return bound


def _norm(matrices: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.matrix_norm(matrices, 2)
    return norm

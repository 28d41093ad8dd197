"""Interpolation of position embeddings, relative position tables and masks to another grid of patches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

GridShape = tuple[int, int]


def fit_to_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
    """The tensor interpolated to `shape`; None if its name is not that of a tensor of positions, or it does not fit."""
    fit = _FITS.get(name.rpartition(".")[2])
    if fit is None or tensor.ndim != len(shape):
        return None
    changed = fit(tensor, shape)
    return changed if changed is not None and changed.shape == torch.Size(shape) else None


def interpolate(tensor: Tensor, new: GridShape) -> Tensor:
    """Bicubic interpolation of (B, C, H, W). To a larger grid as in DINO and Singh et al. 2023, by a scale factor.

    The factor is slightly above new / old and determines where torch samples, so published numbers depend on it.
    """
    old = tensor.shape[-2:]
    if new[0] < old[0] or new[1] < old[1]:
        return F.interpolate(tensor, new, mode="bicubic", antialias=True)
    scale = ((new[0] + 0.1) / old[0], (new[1] + 0.1) / old[1])
    return F.interpolate(tensor, scale_factor=scale, mode="bicubic")


def _square(count: int) -> int:
    """The side of the largest square grid of at most this many positions."""
    return math.isqrt(count)


def _along(tensor: Tensor, axis: int, old: GridShape, new: GridShape) -> Tensor:
    """Interpolate an axis that is a flattened grid."""
    moved = tensor.movedim(axis, -1)
    grown = interpolate(moved.reshape(1, -1, *old), new)
    return grown.reshape(*moved.shape[:-1], new[0] * new[1]).movedim(-1, axis)


def _embedding(tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
    """(1, prefix + N, D): those of prefix tokens, such as the class token, are kept."""
    if tensor.ndim != 3:
        return None
    old, new = _square(tensor.shape[1]), _square(shape[1])
    prefix = tensor.shape[1] - old * old
    if prefix != shape[1] - new * new:  # not square
        return None
    patches = _along(tensor[:, prefix:], 1, (old, old), (new, new))
    return torch.cat([tensor[:, :prefix], patches], 1)


def _flat_table(axis: int) -> Callable[[Tensor, Sequence[int]], Tensor | None]:
    """A table of relative positions on a square grid, flattened into one axis."""

    def fit(tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
        if tensor.ndim == 3:  # (heads, 2h-1, 2w-1)
            return interpolate(tensor[None], (shape[1], shape[2]))[0]
        old, new = _square(tensor.shape[axis]), _square(shape[axis])
        if (old * old, new * new) != (tensor.shape[axis], shape[axis]):
            return None
        return _along(tensor, axis, (old, old), (new, new))

    return fit


def _pairs(tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
    """(heads, N, N): a number for each pair of query and key."""
    old, new = _square(tensor.shape[-1]), _square(shape[-1])
    if (old * old, new * new) != (tensor.shape[-1], shape[-1]):
        return None
    return _along(_along(tensor, 2, (old, old), (new, new)), 1, (old, old), (new, new))


def _line(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """(heads, d, H, 1) or (heads, d, 1, W): embeddings of rows or columns."""
    return interpolate(tensor, (shape[2], shape[3]))


def _table(tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
    """(2h-1, 2w-1): one table of relative positions for all heads."""
    return interpolate(tensor[None, None], (shape[0], shape[1]))[0, 0] if tensor.ndim == 2 else None


_FITS: dict[str, Callable[[Tensor, Sequence[int]], Tensor | None]] = {
    "pos_embed": _embedding,
    "relative_position_bias_table": _flat_table(0),
    "attention_biases": _flat_table(1),
    "table": _table,
    "att_mask": _pairs,
    "rel_h": _line,
    "rel_w": _line,
}

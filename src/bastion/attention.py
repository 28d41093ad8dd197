"""Attention maps as they are made, whatever a family calls its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class AttentionMode(TorchFunctionMode):
    """Sees every softmax over keys, the last axis; fused attention is computed in the open instead.

    Families with an axis of windows have it folded into the batch. Some fold the heads into the batch; where the size
    of the batch is told, such maps are seen too.
    """

    _SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
    batch: int | None = None

    def made(self, attention: Tensor) -> Tensor:
        """What the model is to go on with, given this map (B, heads, queries, keys)."""
        raise NotImplementedError

    @property
    def watching(self) -> bool:
        return True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not self.watching:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._open(*args, **kwargs)
        result = func(*args, **kwargs)
        if func not in self._SOFTMAX:
            return result
        over_keys = kwargs.get("dim", args[1] if len(args) > 1 else None) in (-1, result.ndim - 1)
        return self._seen(result) if over_keys else result

    def _seen(self, weights: Tensor) -> Tensor:
        """Whatever the axes before queries and keys, as batch and heads."""
        if weights.ndim == 5:  # (B, windows, heads, queries, keys)
            return self.made(weights.flatten(0, 1)).reshape(weights.shape)
        if weights.ndim == 3 and self.batch and weights.shape[0] % self.batch == 0:
            return self.made(weights.reshape(self.batch, -1, *weights.shape[1:])).flatten(0, 1)
        return self.made(weights) if weights.ndim == 4 else weights

    def _open(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = torch.softmax(scores, dim=-1)
        return F.dropout(self._seen(weights), dropout_p) @ value

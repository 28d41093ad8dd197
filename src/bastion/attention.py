"""Attention maps of any model, intercepted as they are computed, whatever the model calls its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class AttentionMode(TorchFunctionMode):
    """Calls `on_map` with each attention map: each softmax over the last axis, the keys. Fused attention is unfused.

    An axis of windows is flattened into the batch axis. Maps of models that flatten the heads into the batch axis are
    found too, if `batch` is set to the batch size.
    """

    _SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
    batch: int | None = None

    def on_map(self, attention: Tensor) -> Tensor:
        """Gets a map (B, heads, queries, keys), and returns the map that the model is to use."""
        raise NotImplementedError

    @property
    def active(self) -> bool:
        """Whether maps computed now are passed to `on_map`."""
        return True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not self.active:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._unfused(*args, **kwargs)
        result = func(*args, **kwargs)
        if func not in self._SOFTMAX:
            return result
        over_keys = kwargs.get("dim", args[1] if len(args) > 1 else None) in (-1, result.ndim - 1)
        return self._map(result) if over_keys else result

    def _map(self, weights: Tensor) -> Tensor:
        """Call `on_map` with the axes before queries and keys reshaped to batch and heads."""
        if weights.ndim == 5:  # (B, windows, heads, queries, keys)
            return self.on_map(weights.flatten(0, 1)).reshape(weights.shape)
        if weights.ndim == 3 and self.batch and weights.shape[0] % self.batch == 0:
            return self.on_map(weights.reshape(self.batch, -1, *weights.shape[1:])).flatten(0, 1)
        return self.on_map(weights) if weights.ndim == 4 else weights

    def _unfused(
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
        return F.dropout(self._map(weights), dropout_p) @ value

"""Attention maps as they are made, whatever a family calls its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class AttentionMode(TorchFunctionMode):
    """Sees every softmax over a 4-D tensor that is run inside; fused attention is computed in the open instead."""

    _SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)

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
        return self.made(result) if func in self._SOFTMAX and result.ndim == 4 else result

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
        return F.dropout(self.made(weights) if weights.ndim == 4 else weights, dropout_p) @ value

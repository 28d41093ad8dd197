"""Right gradients for a single image.

torch's CPU kernels for the backward pass of BatchNorm and InstanceNorm take a gradient that is laid out channels-last
for one that is not, if the batch has one image: strides of an axis of length 1 say nothing, and they trust them.
So it is behind `flatten(2).transpose(1, 2)`, as in the stems of XCiT and LeViT: values come back in the wrong
places, without an error. Inside `aligned`, what goes into these kernels is laid out plainly.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

NORMS = (F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm)


def aligned(x: Tensor) -> AbstractContextManager[Any]:
    """For a forward pass on x whose gradients are wanted."""
    return _Aligned() if len(x) == 1 and x.device.type == "cpu" and torch.is_grad_enabled() else nullcontext()


class _Aligned(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in NORMS:
            return func(*args, **kwargs)
        first, *rest = args or (kwargs.pop("input"),)
        normed = func(first.contiguous(), *rest, **kwargs)
        if normed.requires_grad:
            normed.register_hook(Tensor.contiguous)
        return normed

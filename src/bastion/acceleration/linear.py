"""Linear layers computed by oneDNN instead of MKL.

torch multiplies float32 matrices on x86 with MKL, which uses AVX-512 on Intel's processors only. oneDNN, which computes
torch's convolutions, uses it on all: on an AMD EPYC with AVX-512 its linear layers take less than half the time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def use_onednn(network: nn.Module) -> None:
    """Let the linear layers of a network run by oneDNN, where torch's own would run by MKL."""
    backends: Any = torch.backends
    if not (backends.mkl.is_available() and backends.mkldnn.is_available()):
        return
    for part in network.modules():
        if type(part) is nn.Linear:  # a subclass may compute something else
            part.__class__ = Linear


class Linear(nn.Linear):
    """Runs by oneDNN in float32 on the CPU, if its weight and bias require no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        constant = not (self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad))
        plain = x.device.type == "cpu" and x.dtype == self.weight.dtype == torch.float32 and x.ndim > 1
        if not plain or torch.is_autocast_enabled("cpu") or (torch.is_grad_enabled() and not constant):
            return super().forward(x)
        # In two dimensions: the operator would return a view of more, which must not be written to.
        made: Tensor = _Product.apply(x.flatten(0, -2), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return made.reshape(*x.shape[:-1], self.out_features)


class _Product(torch.autograd.Function):
    """x Wᵀ + b, with a gradient for x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return _multiplied(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return _multiplied(gradient, weight.T, None), None, None


def _multiplied(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return made

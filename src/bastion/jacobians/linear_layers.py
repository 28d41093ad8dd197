"""Convolutions and BatchNorm with a cheap double backward pass.

Products with a Jacobian take a backward pass and the backward pass of that. torch's double backward of a convolution
runs a convolution for each group of channels, which for depthwise convolutions costs a hundred times the layer itself.
Both layers are linear in their input, so with a transposed convolution as the backward pass, and BatchNorm as scale and
shift, each pass costs about as much as the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

TRANSPOSED: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    F.conv1d: F.conv_transpose1d,
    F.conv2d: F.conv_transpose2d,
    F.conv3d: F.conv_transpose3d,
}


class LinearLayers(TorchFunctionMode):
    """Inside, these layers have a cheap double backward pass for their input, and no gradient for their weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in TRANSPOSED:
            return _convolve(func, *args, **kwargs)
        if func is F.batch_norm:
            return _batch_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _convolve(
    func: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    if isinstance(padding, str) or weight.requires_grad or not input.requires_grad:
        return func(input, weight, bias, stride, padding, dilation, groups)
    made: Tensor = _Convolution.apply(input, weight, bias, func, stride, padding, dilation, groups)  # type: ignore[no-untyped-call]
    return made


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Any, func: Any, stride: Any, padding: Any, dilation: Any, groups: int
    ) -> Tensor:
        y: Tensor = func(x, weight, bias, stride, padding, dilation, groups)
        ctx.save_for_backward(weight)
        # `output_padding` of the transposed convolution: pixels at the end that the stride does not reach.
        steps, pads, gaps = (_by_side(each, x) for each in (stride, padding, dilation))
        sides = zip(x.shape[2:], y.shape[2:], weight.shape[2:], steps, pads, gaps, strict=True)
        over = [
            size - (out - 1) * step + 2 * pad - gap * (kernel - 1) - 1 for size, out, kernel, step, pad, gap in sides
        ]
        ctx.back, ctx.geometry = TRANSPOSED[func], (stride, padding, over, groups, dilation)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.back(gradients[0], *ctx.saved_tensors, None, *ctx.geometry), *[None] * 7


def _by_side(setting: Any, x: Tensor) -> tuple[int, ...]:
    return (setting,) * (x.ndim - 2) if isinstance(setting, int) else tuple(setting)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or running_mean is None or running_var is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    scale = (running_var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    shape = (1, -1, *[1] * (input.ndim - 2))
    return input * scale.view(shape).to(input.dtype) + shift.view(shape).to(input.dtype)

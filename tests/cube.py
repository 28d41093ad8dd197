"""x³ as functions that autograd can differentiate in one way and not in another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Cube(torch.autograd.Function):
    """Twice in reverse mode; not in forward mode."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * gradients[0]


class CubeOnce(Cube):
    """Once in reverse mode; not in forward mode."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return Cube.backward(ctx, *gradients)


class CubeForward(CubeOnce):
    """Once in reverse mode; in forward mode too."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return Cube.backward(ctx, *tangents)

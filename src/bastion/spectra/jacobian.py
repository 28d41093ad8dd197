"""Products with the Jacobian of a function, for each example of a batch, without the Jacobian."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from bastion.errors import BastionError
from bastion.forward import single_image_gradients

Function = Callable[[Tensor], Tensor]  # (B, …) to (B, …), each example by itself


class Jacobian:
    """Of a function at x: `apply(v)` is Jv, `transpose(u)` is Jᵀu, for flat vectors (B, n) and (B, m).

    The function runs once. Jᵀu goes back along its graph; it is linear in u, so going back along the graph of *that*
    gives Jv, at the same cost and as its exact transpose. Where an operation cannot be differentiated twice, Jv is by
    forward mode, which runs the function for each product.
    """

    def __init__(self, function: Function, x: Tensor, name: str = "jacobian") -> None:
        self.function, self.name = function, name
        self.x = x.detach().clone().requires_grad_()
        with _differentiable(x), torch.enable_grad():
            self.y = function(self.x.clone())  # of a copy, which the function may change in place
            if not isinstance(self.y, Tensor) or not self.y.is_floating_point() or len(self.y) != len(x):
                got = f"{tuple(self.y.shape)}" if isinstance(self.y, Tensor) else type(self.y).__name__
                raise BastionError(f"{name}: expected a result for each of {len(x)} examples, got {got}")
            self.inputs, self.outputs = math.prod(x.shape[1:]), math.prod(self.y.shape[1:])
            self.u = torch.zeros_like(self.y).requires_grad_()
            self.transposed = self._back(self.y, self.x, self.u, keep_graph=True)
        self.forward_mode = self._cannot_go_back_twice()

    def apply(self, v: Tensor) -> Tensor:
        v = v.view_as(self.x)
        if self.forward_mode:
            return self._dual(v).flatten(1)
        product = None if self.transposed is None else self._back(self.transposed, self.u, v)
        return torch.zeros_like(self.u).flatten(1) if product is None else product.flatten(1)

    def transpose(self, u: Tensor) -> Tensor:
        product = self._back(self.y, self.x, u.view_as(self.y))
        return torch.zeros_like(self.x).flatten(1) if product is None else product.flatten(1)

    @property
    def is_square(self) -> bool:
        """The result is of the input's shape, so that the function may be x + F(x)."""
        return self.x.shape == self.y.shape

    @staticmethod
    def _back(y: Tensor, x: Tensor, along: Tensor, *, keep_graph: bool = False) -> Tensor | None:
        """None: y does not depend on x."""
        if not y.requires_grad:
            return None
        (product,) = torch.autograd.grad(y, x, along, retain_graph=True, create_graph=keep_graph, allow_unused=True)
        return product if keep_graph or product is None else product.detach()

    def _dual(self, v: Tensor) -> Tensor:
        with _differentiable(self.x), torch.no_grad(), forward_ad.dual_level():
            dual: Any = forward_ad
            tangent: Tensor | None = dual.unpack_dual(self.function(dual.make_dual(self.x.detach().clone(), v))).tangent
        return torch.zeros_like(self.u) if tangent is None else tangent

    def _cannot_go_back_twice(self) -> bool:
        if self.transposed is None:
            return False
        nothing = torch.zeros_like(self.x)
        try:
            if self.transposed.requires_grad:
                self._back(self.transposed, self.u, nothing)
                return False
        except RuntimeError:
            pass
        try:
            self._dual(nothing)
        except RuntimeError as error:
            raise BastionError(
                f"{self.name}: no products with the Jacobian: an operation has neither a second derivative nor forward "
                f"mode ({error}); replace it by others"
            ) from error
        return True


class Branch(Jacobian):
    """J − I: of F, where the function is x + F(x)."""

    def __init__(self, whole: Jacobian) -> None:
        self.__dict__.update(whole.__dict__)  # along the same graphs

    def apply(self, v: Tensor) -> Tensor:
        return super().apply(v) - v

    def transpose(self, u: Tensor) -> Tensor:
        return super().transpose(u) - u


@contextmanager
def _differentiable(x: Tensor) -> Iterator[None]:
    """Fused attention has no second derivative, and some kernels are wrong for one image."""
    with sdpa_kernel(SDPBackend.MATH), single_image_gradients(x):
        yield

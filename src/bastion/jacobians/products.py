"""Products with the Jacobian of a function, for each example of a batch, without computing the Jacobian."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from bastion import rng
from bastion.errors import BastionError
from bastion.forward import single_image_gradients
from bastion.jacobians.linear_layers import LinearLayers

ADJOINT = 1e-3  # relative error: far more than rounding, far less than from a missing path of the graph
GRAPHS = 3  # graphs, each about as large as that of a forward pass: its own, of its backward pass, and of that one's

Function = Callable[[Tensor], Tensor]  # (B, …) to (B, …), each example by itself


class Jacobian:
    """The Jacobian J of a function at x: `apply(v)` is Jv, `transpose(u)` is Jᵀu, for flat vectors (B, n) and (B, m).

    The function runs once. Jᵀu is a backward pass along its graph. It is linear in u, so a backward pass along the
    graph of *that* gives Jv, at the same cost and as the exact transpose. If an operation cannot be differentiated
    twice, Jv is computed in forward mode, which runs the function for each product.
    """

    noise = 0.0  # rounding errors are a share of the product, so none are there at least

    def __init__(self, function: Function, x: Tensor, name: str = "jacobian") -> None:
        self.function, self.name = function, name
        self.x = x.detach().clone().requires_grad_()
        try:
            self._linearise()
        except RuntimeError as error:
            raise BastionError(f"{name}: no gradient to go back along ({str(error).splitlines()[0]})") from error
        self.forward_mode = False
        if not self._is_adjoint():
            self.forward_mode = True
            self._check_forward_mode()

    def _linearise(self) -> None:
        with _differentiable(self.x), LinearLayers(), torch.enable_grad():
            self.y = self.function(self.x.clone())  # a copy, as the function may change it in place
            if not isinstance(self.y, Tensor) or not self.y.is_floating_point() or len(self.y) != len(self.x):
                got = f"{tuple(self.y.shape)}" if isinstance(self.y, Tensor) else type(self.y).__name__
                raise BastionError(f"{self.name}: expected a result for each of {len(self.x)} examples, got {got}")
            self.inputs, self.outputs = math.prod(self.x.shape[1:]), math.prod(self.y.shape[1:])
            self.u = torch.zeros_like(self.y).requires_grad_()
            self.transposed = self._back(self.y, self.x, self.u, keep_graph=True)

    def apply(self, v: Tensor) -> Tensor:
        v = v.view_as(self.x)
        if self.forward_mode:
            return self._dual(v).flatten(1)
        product = None if self.transposed is None else self._back(self.transposed, self.u, v)
        return torch.zeros_like(self.y).flatten(1) if product is None else product.flatten(1)

    def transpose(self, u: Tensor) -> Tensor:
        product = self._back(self.y, self.x, u.view_as(self.y))
        return torch.zeros_like(self.x).flatten(1) if product is None else product.flatten(1)

    @property
    def is_square(self) -> bool:
        """Output and input have the same shape, so that the function may be x + F(x)."""
        return self.x.shape == self.y.shape

    @staticmethod
    def _back(y: Tensor, x: Tensor, along: Tensor, *, keep_graph: bool = False) -> Tensor | None:
        """Return the product with `along`; None if y does not depend on x."""
        if not y.requires_grad:
            return None
        (product,) = torch.autograd.grad(y, x, along, retain_graph=True, create_graph=keep_graph, allow_unused=True)
        return product if keep_graph or product is None else product.detach()

    def _dual(self, v: Tensor) -> Tensor:
        dual: Any = forward_ad
        with warnings.catch_warnings(), _differentiable(self.x), torch.no_grad():
            # torch's forward mode itself uses a deprecated part of torch.
            warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
            with dual.dual_level():
                y = self.function(dual.make_dual(self.x.detach().clone(), v))
                tangent: Tensor | None = dual.unpack_dual(y).tangent
        return torch.zeros_like(self.y) if tangent is None else tangent.detach()

    def _is_adjoint(self) -> bool:
        """Whether ⟨u, Jv⟩ = ⟨Jᵀu, v⟩. If the double backward graph misses a path, Jv is wrong without an error."""
        index = torch.arange(len(self.x), device=self.x.device)
        v, u = (
            rng.normal(0, index, f"adjoint {side}", (size,), dtype=self.x.dtype)
            for side, size in (("v", self.inputs), ("u", self.outputs))
        )
        try:
            forth, back = self.apply(v).double(), self.transpose(u).double()
        except RuntimeError:
            return False
        difference = (u.double() * forth).sum(1) - (back * v.double()).sum(1)
        size = torch.maximum(*(torch.linalg.vector_norm(each, dim=1) for each in (forth, back)))
        return not bool((difference.abs() > ADJOINT * size).any())  # NaN is ignored

    def _check_forward_mode(self) -> None:
        try:
            self._dual(torch.zeros_like(self.x))
        except RuntimeError as error:
            raise BastionError(
                f"{self.name}: no products with the Jacobian: an operation has neither a second derivative nor forward "
                f"mode ({str(error).splitlines()[0]}); replace it"
            ) from error
        if not self._is_adjoint():
            raise BastionError(
                f"{self.name}: no Jacobian by image: forward and reverse mode give different ones, as for a gradient "
                "that was written by hand (give it one `jvp` that fits its `backward`), or a block that mixes the "
                "examples of a batch"
            )


class Branch:
    """J − I: the Jacobian of F, if the function is x + F(x)."""

    def __init__(self, whole: Jacobian) -> None:
        self.whole = whole
        self.x, self.inputs, self.outputs = whole.x, whole.inputs, whole.outputs
        # However small F is, the numbers of Jv are rounded at the size of those of v, by about a fifth of an epsilon.
        # Less is taken, as a search must not end for more noise than there is.
        self.noise = torch.finfo(whole.x.dtype).eps / 8

    @property
    def forward_mode(self) -> bool:
        return self.whole.forward_mode

    def apply(self, v: Tensor) -> Tensor:
        return self.whole.apply(v) - v

    def transpose(self, u: Tensor) -> Tensor:
        return self.whole.transpose(u) - u


@contextmanager
def _differentiable(x: Tensor) -> Iterator[None]:
    """Without fused attention, which has no second derivative, and without kernels that are wrong for one image."""
    with sdpa_kernel(SDPBackend.MATH), single_image_gradients(x):
        yield

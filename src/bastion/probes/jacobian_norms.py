"""An upper bound of singular values by ‖J‖₁ and ‖J‖∞, and how loose it is (Wang and Ruan 2022, Eq. 16)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from bastion import rng
from bastion.acceleration import saved_bytes
from bastion.errors import BastionError
from bastion.forward import check_batch, frozen
from bastion.jacobians.lanczos import largest
from bastion.jacobians.parts import Call, Chain
from bastion.jacobians.products import GRAPHS, Jacobian
from bastion.memory import check_memory
from bastion.probes import probes
from bastion.settings import AtLeastOne, settings
from bastion.types import Batch, Probe

ROWS = 64  # rows of Jacobians computed by one product
BY_BLOCK = ("norm_1", "norm_inf", "frobenius", "sigma", "sigma_residual")
TOLERANCE = 1e-4  # of the residual of `sigma`
BASIS = 64  # most Lanczos vectors kept for `sigma`


@probes.register("jacobian-norms")
@settings
class JacobianNorms(Probe):
    """‖J‖₁ and ‖J‖∞ of every residual block with its skip connection, row by row, and √(‖J‖₁‖J‖∞) ≥ σ_max.

    It takes a product for each number in a block's output, so blocks must be small. J is never stored as a whole.
    """

    most: AtLeastOne = 16384  # most numbers in a block's output

    revision: ClassVar[int] = 2
    facts: ClassVar[Mapping[str, str]] = {
        "norm_1": "largest column sum of |J|, by block",
        "norm_inf": "largest row sum of |J|, by block",
        "frobenius": "root of the sum of squares of J, by block",
        "sigma": "largest singular value of J, by block",
        "sigma_residual": "‖Jᵀu − σv‖ / σ of `sigma`",
        "table_2": "√(max over blocks of ‖J‖₁ · max over blocks of ‖J‖∞) (Table 2 of Wang and Ruan)",
        "looseness": "table_2 over the largest singular value of all blocks",
    }

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        model, batch = check_batch(model, batch, "jacobian-norms")
        with frozen(model):
            self._check(Chain(model, batch.x[:1], "jacobian-norms"), min(len(batch.x), ROWS))
            chunks = [self._facts(model, chunk, seed) for chunk in batch.chunk(-(-len(batch.x) // ROWS))]
        return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}

    def _facts(self, model: nn.Module, batch: Batch, seed: int) -> dict[str, Tensor]:
        single = Chain(model, batch.x, "jacobian-norms")
        copies = ROWS // len(batch.x)  # of each example, so that a product makes several of its rows
        repeated = Chain(model, batch.x.repeat_interleave(copies, dim=0), "jacobian-norms")
        facts = {name: torch.full((len(batch.x), len(single.names)), torch.nan) for name in BY_BLOCK}
        searched = [single.names.index(call.name) for call in single.calls]
        for number, call, copied in zip(searched, single.calls, repeated.calls, strict=True):
            where = f"jacobian-norms, block {call.name}"
            jacobian = Jacobian(call.function, call.x, where)
            start = rng.normal(seed, batch.index, where, (jacobian.inputs,), dtype=call.x.dtype)
            norms = _norms(Jacobian(copied.function, copied.x, where), copies)
            exact = largest(jacobian, lambda _, start=start: start, tolerance=TOLERANCE, basis=BASIS)  # type: ignore[misc]
            norms |= {"sigma": exact.values[:, 0], "sigma_residual": exact.residuals[:, 0]}
            for name, norm in norms.items():
                facts[name][:, number] = norm.float()
        norm_1, norm_inf, sigma, residual = (
            facts[name][:, searched] for name in ("norm_1", "norm_inf", "sigma", "sigma_residual")
        )
        bound = (norm_1.amax(1) * norm_inf.amax(1)).sqrt()
        looseness = bound / sigma.amax(1)
        unconverged = ~(residual <= TOLERANCE).all(1)  # true of NaN too
        return facts | {"table_2": bound, "looseness": looseness, "warning.unconverged": unconverged}

    def _check(self, chain: Chain, examples: int) -> None:
        """Raise an error before the first product if a block is too large for `most` or for the memory."""
        widest = max(chain.calls, key=lambda call: call.y[0].numel())
        if (size := widest.y[0].numel()) > self.most:
            raise BastionError(
                f"jacobian-norms: block {widest.name} puts out {size:,} numbers for an image, each of which takes a "
                "product; raise `most` if you can wait, or measure `jacobian` alone, which is exact and takes a hundred"
            )
        inputs = (examples + ROWS) * sum(chain.sizes()) * chain.x.element_size()  # of all blocks, which are recorded
        check_memory(
            inputs + max(_bytes(call, examples) for call in chain.calls),
            chain.x.device,
            f"jacobian-norms: {ROWS} rows of a Jacobian at once, of {examples} images",
            "set a smaller batch size, or measure `jacobian` alone, which needs less",
        )


def _bytes(call: Call, examples: int) -> int:
    """Memory for a block's rows, or for its singular values afterwards; the graphs of its examples serve both."""
    n, m, size = call.x[0].numel(), call.y[0].numel(), call.x.element_size()
    graph = GRAPHS * saved_bytes(call.block.module, call.x, lambda z: call.function(z.clone()))
    rows = graph + m * size + n * (size + 3 * 8)  # unit vectors, products, and these in double precision
    return examples * graph + max(ROWS * rows, examples * BASIS * (n + m) * size)


def _norms(jacobian: Jacobian, copies: int) -> dict[str, Tensor]:
    """The norms (B,) for a batch in which every example is repeated `copies` times."""
    b, m = len(jacobian.x) // copies, jacobian.outputs
    columns = torch.zeros(b, jacobian.inputs, dtype=torch.float64, device=jacobian.x.device)
    rows, squares = columns.new_zeros(b), columns.new_zeros(b)
    every = torch.arange(b * copies, device=columns.device)
    for first in range(0, m, copies):
        number = first + every % copies
        units = jacobian.x.new_zeros(b * copies, m)
        units[every, number.clamp(max=m - 1)] = (number < m).to(units.dtype)
        made = jacobian.transpose(units).double().abs().view(b, copies, -1)
        columns += made.sum(1)
        rows = torch.maximum(rows, made.sum(2).amax(1))
        squares += made.square().sum((1, 2))
    return {"norm_1": columns.amax(1), "norm_inf": rows, "frobenius": squares.sqrt()}

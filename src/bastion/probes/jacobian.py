"""Largest singular values of the Jacobians of a network and its parts (Wang and Ruan 2022)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, ClassVar, Literal, get_args

import torch
from annotated_types import Ge, Gt, Lt, MinLen
from torch import Tensor, nn

from bastion import forward, rng
from bastion.acceleration import saved_bytes
from bastion.forward import check_batch, frozen, misclassified
from bastion.jacobians.lanczos import SingularValues, largest
from bastion.jacobians.parts import Chain
from bastion.jacobians.products import GRAPHS, Branch, Function, Jacobian
from bastion.memory import check_memory
from bastion.probes import probes
from bastion.settings import AtLeastOne, settings
from bastion.types import Batch, Description, Probe

Fact = Literal["branch", "block", "embedding", "head", "network"]
OF_BLOCKS = ("branch", "block")
MEMORY = 1 << 30  # bytes that the examples of a chunk may need
MOST = 32  # examples in a chunk


@probes.register("jacobian")
@settings
class JacobianSpectra(Probe):
    """The `top` largest singular values of Jacobians, exact to `tolerance`, computed by products with J and Jᵀ.

    Of every residual block with its skip connection, x + F(x), and without it, F; of the embedding (pixels to the first
    block), of the head (last block to logits) and of the whole network.
    """

    parts: Annotated[tuple[Fact, ...], MinLen(1)] = ("branch", "block", "embedding", "head", "network")
    top: AtLeastOne = 1
    tolerance: Annotated[float, Gt(0), Lt(1)] = 1e-4  # of the residuals, relative to the largest singular value
    basis: AtLeastOne = 64  # most Lanczos vectors kept: fewer take less memory and more products
    products: Annotated[int, Ge(2)] = 2000  # most products in one search

    facts: ClassVar[Mapping[str, str]] = {
        "branch": "largest singular values of the Jacobian of F, by block; NaN where a block changes the shape",
        "block": "largest singular values of the Jacobian of x + F(x), by block",
        "embedding": "largest singular values of the Jacobian from pixels to the first block",
        "head": "largest singular values of the Jacobian from the last block to logits",
        "network": "largest singular values of the Jacobian from pixels to logits",
        **{f"{name}_residual": f"‖Jᵀu − σv‖ / σ₁ of `{name}`, or ‖Jv − σu‖ / σ₁ if larger" for name in get_args(Fact)},
        "table_1": "largest of `block` over all blocks (Table 1 of Wang and Ruan); NaN for misclassified images",
        "exponent": "sum over the blocks of the largest of `branch` (Eq. 15 of Wang and Ruan)",
        "products": "with J and with Jᵀ, over all parts",
        "forward_mode": "searches that used forward mode, because an operation has no second derivative",
    }

    def __post_init__(self) -> None:
        if self.basis < self.top + 2:
            raise ValueError(f"basis: {self.basis} vectors are too few for top={self.top}, it needs {self.top + 2}")

    def describe(self) -> Description:
        return Description(revisions=(2,) if self.top > 1 else ())  # since then, residuals are bounds for any `top`

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        model, batch = check_batch(model, batch, "jacobian")
        with frozen(model):
            at_once = self._examples_at_once(model, batch.x[:1])
            chunks = [self._facts(model, chunk, seed) for chunk in batch.chunk(-(-len(batch.x) // at_once))]
        return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}

    def _facts(self, model: nn.Module, batch: Batch, seed: int) -> dict[str, Tensor]:
        chain = Chain(model, batch.x, "jacobian") if self._needs_blocks else None
        columns = self._empty(len(batch.x), len(chain.names) if chain else 0)
        searched: dict[str, list[int]] = {part: [] for part in OF_BLOCKS}
        for part, block, operator in self._operators(model, batch.x, chain):
            found = self._search(operator, batch.index, rng.key("jacobian", part, block), seed)
            at: tuple[slice | int, ...] = (slice(None),)
            if chain and block:
                searched[part].append(chain.names.index(block))
                at = (slice(None), searched[part][-1])
            columns[part][at], columns[f"{part}_residual"][at] = found.values.float(), found.residuals.float()
            columns["products"] += found.products.cpu()
            columns["forward_mode"] += operator.forward_mode
            columns["warning.unconverged"] |= ~(found.residuals <= self.tolerance).all(1).cpu()  # true for NaN
        if chain and "block" in self.parts:
            right = ~misclassified(chain.logits, batch.y).cpu()
            columns["table_1"] = columns["block"][:, searched["block"], 0].amax(1).where(right, torch.nan)
        if "branch" in self.parts:
            columns["exponent"] = columns["branch"][:, searched["branch"], 0].sum(1)
        return columns

    def _empty(self, examples: int, blocks: int) -> dict[str, Tensor]:
        """Columns before the first search: NaN, as it stays where there is nothing to search; 0 and False."""
        shapes = {
            part: (examples, blocks, self.top) if part in OF_BLOCKS else (examples, self.top) for part in self.parts
        }
        values = {
            name: torch.full(shape, torch.nan) for part, shape in shapes.items() for name in (part, f"{part}_residual")
        }
        kinds = {"products": torch.int64, "forward_mode": torch.int64, "warning.unconverged": torch.bool}
        return values | {name: torch.zeros(examples, dtype=kind) for name, kind in kinds.items()}

    @property
    def _needs_blocks(self) -> bool:
        return set(self.parts) != {"network"}

    def _operators(
        self, model: nn.Module, x: Tensor, chain: Chain | None
    ) -> Iterator[tuple[str, str, Jacobian | Branch]]:
        """The name of the fact, the name of the block ("" if none), and the Jacobian."""
        if chain and set(self.parts) & set(OF_BLOCKS):
            for call in chain.calls:
                whole = Jacobian(call.function, call.x, f"jacobian, block {call.name}")
                if "block" in self.parts:
                    yield "block", call.name, whole
                if "branch" in self.parts and whole.is_square:
                    yield "branch", call.name, Branch(whole)
        others: dict[str, tuple[Function, Tensor]] = {"network": (partial(forward.logits, model), x)}
        if chain:
            others |= {"embedding": (chain.embedding, x), "head": (chain.head, chain.calls[-1].y)}
        for part, (function, at) in others.items():
            if part in self.parts:
                yield part, "", Jacobian(function, at, f"jacobian, {part}")

    def _search(self, operator: Jacobian | Branch, index: Tensor, draw: int, seed: int) -> SingularValues:
        def start(number: int) -> Tensor:
            return rng.normal(seed, index, rng.key("start", draw, number), (operator.inputs,), dtype=operator.x.dtype)

        return largest(operator, start, top=self.top, tolerance=self.tolerance, basis=self.basis, limit=self.products)

    def _examples_at_once(self, model: nn.Module, x: Tensor) -> int:
        """Depends only on the model and the image size; an error if the memory is too small for one example."""
        sizes = [x[0].numel() + forward.logits(model, x)[0].numel()]
        sizes += Chain(model, x, "jacobian").sizes() if self._needs_blocks else []
        vectors = (self.basis + 3 * self.top) * max(sizes) * x.element_size()
        needed = vectors + GRAPHS * saved_bytes(model, x)
        check_memory(
            needed,
            x.device,
            f"jacobian: one example with {self.basis} vectors of {max(sizes):,} numbers",
            "set a smaller `basis`, or leave out `parts`",
        )
        return max(1, min(MOST, MEMORY // needed))

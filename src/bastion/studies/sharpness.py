"""Sharpness of the minimum that training has found: worst loss nearby, and the Hessian's eigenvalues and trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor, nn

from bastion import rng
from bastion.acceleration import saved_bytes
from bastion.forward import device_of, in_mode
from bastion.jacobians.products import GRAPHS
from bastion.memory import check_memory
from bastion.settings import AtLeastOne, Count, Positive, settings
from bastion.studies import studies
from bastion.studies.hessian import hutchinson, lanczos
from bastion.studies.weight_space import LossStudy, WeightLoss, Weights, random_direction, trained_weights
from bastion.types import Batch, DataSet

COPIES = 8  # of the weights, at once: gradients, products and sums


@studies.register("sharpness")
@settings
class Sharpness(LossStudy):
    """The worst loss in a ball of weights, the largest eigenvalues of the loss's Hessian, and its trace.

    The loss is the mean cross-entropy in eval mode; with an attack, that of adversarial examples made for the unchanged
    weights. In the ball, every trained parameter of two or more dimensions changes by at most `rho` times its norm, as
    in AWP. The Hessian is with respect to all trained parameters.
    """

    rho: Positive = 0.01
    steps: Count = 5  # of the ascent in the ball
    eigenvalues: AtLeastOne = 5
    iterations: Annotated[int, Ge(2)] = 40  # most Hessian-vector products for the eigenvalues
    tolerance: Positive = 1e-3  # of the residuals, relative to the largest eigenvalue
    probes: Annotated[int, Ge(2)] = 20  # Hessian-vector products for the trace
    batch: AtLeastOne = 64  # examples at once

    name = "sharpness"
    facts: ClassVar[Mapping[str, str]] = {
        "loss": "mean cross-entropy",
        "rise": "of the loss, to the worst found in the ball of weights",
        "top": "the largest eigenvalue of the Hessian",
        "lowest": "the smallest eigenvalue found: negative if the weights are not at a minimum",
        "lowest_residual": "upper bound of its distance to an eigenvalue",
        "eigenvalues": "of the Hessian, the largest first; copies of a multiple one may be missing",
        "residuals": "upper bounds of the distance of each to an eigenvalue",
        "products": "Hessian-vector products for the eigenvalues",
        "trace": "of the Hessian, by Hutchinson's estimate",
        "trace_error": "its standard error",
        "dimension": "number of trained parameters",
    }

    def __post_init__(self) -> None:
        LossStudy.__post_init__(self)
        if self.iterations <= self.eigenvalues:
            raise ValueError(
                f"iterations: {self.eigenvalues} eigenvalues take more than as many products, got {self.iterations}"
            )

    def cost(self, model: nn.Module, data: DataSet) -> str:
        products = self.iterations + self.probes
        told = (
            f"{self.n} images, {self.steps} gradients and up to {products} products of the Hessian, which cost about "
            "two gradients each"
        )
        if (passes := self.attack_passes(model, data)) is None:
            return told
        return f"{told}, after an attack of about {passes[0]} forward and {passes[1]} backward passes per image"

    def __call__(self, model: nn.Module, data: DataSet, part: int, *, seed: int) -> dict[str, Tensor]:
        weights = trained_weights(model, "sharpness")
        dimension = sum(weight.numel() for weight in weights.values())
        batch = self.examples(model, data)
        self._check_memory(model, batch, weights)
        loss = WeightLoss(model, self.attacked(model, batch, seed), self.batch)
        now = loss(weights)
        return {
            "loss": torch.tensor(now, dtype=torch.float64),
            "rise": torch.tensor(self._worst(loss, model, now) - now, dtype=torch.float64),
            "dimension": torch.tensor(dimension),
            **self._hessian(loss, weights, seed),
        }

    def _check_memory(self, model: nn.Module, batch: Batch, weights: Weights) -> None:
        """Raise an error if the Lanczos vectors and the graphs of a product with the Hessian do not fit."""
        at_once = min(self.batch, self.n)
        with in_mode(model, training=False):
            graphs = GRAPHS * at_once * saved_bytes(model, batch.x[:1])
        vectors = (self.iterations + COPIES) * sum(
            weight.numel() * weight.element_size() for weight in weights.values()
        )
        check_memory(
            vectors + graphs,
            device_of(model),
            f"sharpness: {self.iterations} vectors as long as the weights and {at_once} images at once",
            "set fewer `iterations` or a smaller `batch`",
        )

    def _worst(self, loss: WeightLoss, model: nn.Module, now: float) -> float:
        """The largest loss in projected gradient ascent with steps of 2.5 / steps of the radius."""
        centre = trained_weights(model, "sharpness", matrices=True)
        radius = {name: self.rho * torch.linalg.vector_norm(weight) for name, weight in centre.items()}
        weights, worst = dict(centre), now
        for _ in range(self.steps):
            _, gradient = loss.gradient(weights)
            for name in centre:
                step = _scaled(gradient[name], radius[name] * 2.5 / self.steps)
                weights[name] = centre[name] + _at_most(weights[name] - centre[name] + step, radius[name])
            worst = max(worst, loss(weights))
        return worst

    def _hessian(self, loss: WeightLoss, weights: Weights, seed: int) -> dict[str, Tensor]:
        product = _on_vectors(loss, weights)
        start = _flat(random_direction(weights, rng.normal, seed, "lanczos"))
        wanted = min(self.eigenvalues, len(start))
        limit = min(self.iterations, len(start))
        found = lanczos(product, start, wanted=wanted, iterations=limit, tolerance=self.tolerance)
        signs = (_flat(random_direction(weights, rng.signs, seed, "trace", number)) for number in range(self.probes))
        trace, error = hutchinson(product, signs)
        return {
            "top": found.values[0],
            "lowest": found.values[-1],
            "lowest_residual": found.residuals[-1],
            "eigenvalues": _padded(found.values, self.eigenvalues),
            "residuals": _padded(found.residuals, self.eigenvalues),
            "products": torch.tensor(len(found.values)),
            "trace": torch.tensor(trace, dtype=torch.float64),
            "trace_error": torch.tensor(error, dtype=torch.float64),
            "warning.unconverged": torch.tensor(not found.converged),
        }


def _scaled(direction: Tensor, length: Tensor) -> Tensor:
    own: Tensor = torch.linalg.vector_norm(direction)
    return direction * (length / own.clamp(min=torch.finfo(direction.dtype).tiny))


def _at_most(offset: Tensor, length: Tensor) -> Tensor:
    """The offset projected into the ball of radius `length`."""
    own: Tensor = torch.linalg.vector_norm(offset)
    return offset * (length / own) if own > length else offset


def _flat(weights: Weights) -> Tensor:
    return torch.cat([weight.flatten() for weight in weights.values()])


def _on_vectors(loss: WeightLoss, weights: Weights) -> Callable[[Tensor], Tensor]:
    """The Hessian-vector product for flat vectors, in the order of the weights."""
    sizes = [weight.numel() for weight in weights.values()]

    def product(vector: Tensor) -> Tensor:
        parts = zip(weights.items(), torch.split(vector, sizes), strict=True)
        return _flat(loss.hessian_product(weights, {name: part.view_as(weight) for (name, weight), part in parts}))

    return product


def _padded(values: Tensor, count: int) -> Tensor:
    """The first `count` values, padded with NaN."""
    return torch.cat([values, values.new_full((count,), math.nan)])[:count]

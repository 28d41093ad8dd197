"""How sharp is the minimum that training has found?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor, nn

from bastion import rng
from bastion.attacks import Attack, Threat
from bastion.memory import check_memory
from bastion.settings import AtLeastOne, Count, Positive, settings
from bastion.studies import studies
from bastion.studies.examples import SplitName, device_of, first_examples
from bastion.studies.hessian import hutchinson, lanczos
from bastion.studies.weight_space import (
    WeightLoss,
    Weights,
    adversarial,
    attack_passes,
    random_direction,
    trained_weights,
)
from bastion.types import Batch, DataSet, Study


@studies.register("sharpness")
@settings
class Sharpness(Study):
    """The worst loss in a ball of weights, the largest eigenvalues of the loss's Hessian, and its trace.

    The loss is the mean cross-entropy in eval mode; with an attack, that of the adversarial examples of the weights as
    they are. In the ball every trained parameter of two or more dimensions moves by at most `rho` of its own length, as
    in AWP. The Hessian is in all trained parameters.
    """

    n: AtLeastOne = 256  # examples, the first of the split
    split: SplitName = "train"
    threat: Threat | None = None
    attack: Attack | None = None
    rho: Positive = 0.01
    steps: Count = 5  # of the ascent in the ball
    eigenvalues: AtLeastOne = 5
    iterations: Annotated[int, Ge(2)] = 40  # products of the Hessian for them, at most
    tolerance: Positive = 1e-3  # of the largest eigenvalue
    probes: Annotated[int, Ge(2)] = 20  # products for the trace
    batch: AtLeastOne = 64  # examples at once

    facts: ClassVar[Mapping[str, str]] = {
        "loss": "mean cross-entropy",
        "rise": "of the loss, to the worst that was found in the ball of weights",
        "top": "the largest eigenvalue of the Hessian",
        "lowest": "the smallest eigenvalue that was found: negative, if this is no minimum",
        "eigenvalues": "of the Hessian, the largest first",
        "residuals": "how far each is from an eigenvalue at most",
        "products": "of the Hessian, that the eigenvalues took",
        "trace": "of the Hessian, by Hutchinson's estimate",
        "trace_error": "its standard error",
        "dimension": "numbers that training moves",
    }

    def __post_init__(self) -> None:
        if (self.threat is None) != (self.attack is None):
            raise ValueError("the loss under attack needs both `threat` and `attack`")
        if self.iterations <= self.eigenvalues:
            raise ValueError(
                f"iterations: {self.eigenvalues} eigenvalues take more than as many products, got {self.iterations}"
            )

    def plan(self, model: nn.Module, data: DataSet) -> str:
        products = self.iterations + self.probes
        told = (
            f"{self.n} images, {self.steps} gradients and up to {products} products of the Hessian, which cost about "
            "two gradients each"
        )
        if self.attack is None or self.threat is None:
            return told
        forwards, backwards = attack_passes(model, self._examples(model, data), self.attack, self.threat, seed=0)
        return f"{told}, after an attack of about {forwards} forward and {backwards} backward passes per image"

    def __call__(self, model: nn.Module, data: DataSet, part: int, *, seed: int) -> dict[str, Tensor]:
        weights = trained_weights(model, "sharpness")
        dimension = sum(weight.numel() for weight in weights.values())
        check_memory(
            4 * (self.iterations + 8) * dimension, device_of(model), "sharpness.iterations", "ask for fewer of them"
        )
        batch = self._examples(model, data)
        if self.attack is not None and self.threat is not None:
            parts = batch.chunk(-(-self.n // self.batch))
            batch = Batch.cat([adversarial(model, each, self.attack, self.threat, seed=seed) for each in parts])
        loss = WeightLoss(model, batch, self.batch)
        now = loss(weights)
        return {
            "loss": torch.tensor(now, dtype=torch.float64),
            "rise": torch.tensor(self._worst(loss, model, now) - now, dtype=torch.float64),
            "dimension": torch.tensor(dimension),
            **self._hessian(loss, weights, seed),
        }

    def _examples(self, model: nn.Module, data: DataSet) -> Batch:
        return first_examples(data, self.split, self.n, "sharpness.n").to(device_of(model))

    def _worst(self, loss: WeightLoss, model: nn.Module, now: float) -> float:
        """The largest loss on the way of projected gradient ascent, by steps of 2.5 / steps of the radius."""
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
            "eigenvalues": _padded(found.values, self.eigenvalues),
            "residuals": _padded(found.residuals, self.eigenvalues),
            "products": torch.tensor(len(found.values)),
            "trace": torch.tensor(trace, dtype=torch.float64),
            "trace_error": torch.tensor(error, dtype=torch.float64),
        }


def _scaled(direction: Tensor, length: Tensor) -> Tensor:
    own: Tensor = torch.linalg.vector_norm(direction)
    return direction * (length / own.clamp(min=torch.finfo(direction.dtype).tiny))


def _at_most(offset: Tensor, length: Tensor) -> Tensor:
    """The nearest one in the ball."""
    own: Tensor = torch.linalg.vector_norm(offset)
    return offset * (length / own) if own > length else offset


def _flat(weights: Weights) -> Tensor:
    return torch.cat([weight.flatten() for weight in weights.values()])


def _on_vectors(loss: WeightLoss, weights: Weights) -> Callable[[Tensor], Tensor]:
    """The Hessian's product for vectors in the order of the weights."""
    sizes = [weight.numel() for weight in weights.values()]

    def product(vector: Tensor) -> Tensor:
        parts = zip(weights.items(), torch.split(vector, sizes), strict=True)
        return _flat(loss.hessian_product(weights, {name: part.view_as(weight) for (name, weight), part in parts}))

    return product


def _padded(values: Tensor, count: int) -> Tensor:
    """The first ones; NaN for those that there are not."""
    return torch.cat([values, values.new_full((count,), math.nan)])[:count]

"""The loss around a model's weights, along random directions (Li et al. 2018; Fig. 4 of Tang et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge
from torch import Tensor, nn

from bastion import rng
from bastion.acceleration import saved_bytes
from bastion.forward import device_of, frozen, in_mode
from bastion.memory import check_memory
from bastion.settings import Positive, settings
from bastion.studies import studies
from bastion.studies.weight_space import (
    AtWeights,
    LossStudy,
    WeightLoss,
    Weights,
    filter_normalised,
    random_direction,
    trained_weights,
)
from bastion.types import Batch, DataSet

COPIES = 3  # of the weights, at once: a direction, and weights moved along one and along both
DRAWING = 48  # bytes for a random number while its tensor is drawn


@studies.register("landscape")
@settings
class Landscape(LossStudy):
    """Mean cross-entropy at θ + α·d₁ + β·d₂; filters of the random directions d have the norms of those of θ.

    Only trained parameters of two or more dimensions change, not biases, norms and BatchNorm's statistics: the model is
    in eval mode. With an attack, also the loss under attack, with new adversarial examples at every point. One part
    per α.
    """

    dimensions: Literal[1, 2] = 2
    points: Annotated[int, Ge(3)] = 21  # of an axis; odd, so that one of them is the model
    radius: Positive = 1.0  # α and β go from -radius to radius

    name = "landscape"
    facts: ClassVar[Mapping[str, str]] = {
        "alpha": "α, by row",
        "beta": "β, by column",
        "clean": "mean cross-entropy",
        "adversarial": "mean cross-entropy of what the attack returns",
    }

    def __post_init__(self) -> None:
        if self.points % 2 == 0:
            raise ValueError(f"points must be odd, so that the model is one of them, got {self.points}")
        LossStudy.__post_init__(self)

    def parts(self, model: nn.Module, data: DataSet) -> int:
        return self.points

    def cost(self, model: nn.Module, data: DataSet) -> str:
        points = self.points**self.dimensions
        told = f"{points} points × {self.n} images"
        if (passes := self.attack_passes(model, data)) is None:
            return f"{told} = {points * self.n:,} forward passes"
        forwards, backwards = passes
        return (
            f"{told}, about {points * self.n * (2 + forwards):,} forward and {points * self.n * backwards:,} backward "
            "passes"
        )

    def __call__(self, model: nn.Module, data: DataSet, part: int, *, seed: int) -> dict[str, Tensor]:
        batch, weights = self.examples(model, data), trained_weights(model, "landscape", matrices=True)
        self._check_memory(model, batch, weights)
        axis = torch.linspace(-self.radius, self.radius, self.points, dtype=torch.float64)
        axis[self.points // 2] = 0  # exactly: the model itself
        columns = axis if self.dimensions == 2 else axis.new_zeros(1)
        row = _moved(weights, axis[part].item(), self._direction(weights, 0, seed))
        second = self._direction(weights, 1, seed)
        losses = [self._losses(model, batch, _moved(row, beta, second), seed) for beta in columns.tolist()]
        return {
            "alpha": axis[part],
            "beta": columns,
            **{name: torch.tensor([each[name] for each in losses], dtype=torch.float64) for name in losses[0]},
        }

    def _check_memory(self, model: nn.Module, batch: Batch, weights: Weights) -> None:
        """Raise an error if the moved weights, or the graph of an attack, do not fit."""
        at_once = min(self.batch, self.n)
        with in_mode(model, training=False), frozen(model):
            graph = at_once * saved_bytes(model, batch.x[:1]) if self.attack else 0
        copies = COPIES * sum(weight.numel() * weight.element_size() for weight in weights.values())
        drawing = DRAWING * max(weight.numel() for weight in weights.values())
        check_memory(
            copies + max(drawing, graph),
            device_of(model),
            f"landscape: {COPIES} copies of the weights and {at_once} images at once",
            "set a smaller `batch`, or free memory",
        )

    def _direction(self, weights: Weights, number: int, seed: int) -> Weights:
        return filter_normalised(random_direction(weights, rng.normal, seed, "landscape", number), weights)

    def _losses(self, model: nn.Module, batch: Batch, weights: Weights, seed: int) -> dict[str, float]:
        losses = {"clean": WeightLoss(model, batch, self.batch)(weights)}
        if self.attack is not None:
            attacked = self.attacked(AtWeights(model, weights), batch, seed)
            losses["adversarial"] = WeightLoss(model, attacked, self.batch)(weights)
        return losses


def _moved(weights: Weights, length: float, direction: Weights) -> Weights:
    return {name: weight + length * direction[name] for name, weight in weights.items()}

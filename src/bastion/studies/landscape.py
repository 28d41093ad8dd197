"""The loss around a model's weights, along random directions (Li et al. 2018; Fig. 4 of Tang et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge
from torch import Tensor, nn

from bastion import rng
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

    def plan(self, model: nn.Module, data: DataSet) -> str:
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
        first, second = (self._direction(weights, number, seed) for number in range(2))
        axis = torch.linspace(-self.radius, self.radius, self.points, dtype=torch.float64)
        axis[self.points // 2] = 0  # exactly: the model itself
        columns = axis if self.dimensions == 2 else axis.new_zeros(1)
        row = _moved(weights, axis[part].item(), first)
        losses = [self._losses(model, batch, _moved(row, beta, second), seed) for beta in columns.tolist()]
        return {
            "alpha": axis[part],
            "beta": columns,
            **{name: torch.tensor([each[name] for each in losses], dtype=torch.float64) for name in losses[0]},
        }

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

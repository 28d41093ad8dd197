"""The loss around a model's weights, along random directions (Li et al. 2018; Fig. 4 of Tang et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge
from torch import Tensor, nn

from bastion import rng
from bastion.attacks import Attack, Threat
from bastion.settings import AtLeastOne, Positive, settings
from bastion.studies import studies
from bastion.studies.examples import SplitName, device_of, first_examples
from bastion.studies.weight_space import (
    AtWeights,
    WeightLoss,
    Weights,
    adversarial,
    attack_passes,
    filter_normalised,
    random_direction,
    trained_weights,
)
from bastion.types import Batch, DataSet, Study


@studies.register("landscape")
@settings
class Landscape(Study):
    """Mean cross-entropy at θ + α·d₁ + β·d₂, each filter of the random directions d as long as that of the weights θ.

    Weights are trained parameters of two or more dimensions. Biases and norms stay, and so do BatchNorm's statistics:
    the model is in eval mode. With an attack, the loss under it too, attacked anew at every point. A part is one α.
    """

    dimensions: Literal[1, 2] = 2
    points: Annotated[int, Ge(3)] = 21  # of an axis; odd, so that one of them is the model
    radius: Positive = 1.0  # α and β go from -radius to radius
    n: AtLeastOne = 256  # examples, the first of the split
    split: SplitName = "train"
    threat: Threat | None = None
    attack: Attack | None = None
    batch: AtLeastOne = 128  # examples at once

    facts: ClassVar[Mapping[str, str]] = {
        "alpha": "how far along the first direction, by row",
        "beta": "how far along the second direction, by column",
        "clean": "mean cross-entropy",
        "adversarial": "mean cross-entropy of what the attack returns",
    }

    def __post_init__(self) -> None:
        if self.points % 2 == 0:
            raise ValueError(f"points must be odd, so that the model is one of them, got {self.points}")
        if (self.threat is None) != (self.attack is None):
            raise ValueError("the loss under attack needs both `threat` and `attack`")

    def parts(self, model: nn.Module, data: DataSet) -> int:
        return self.points

    def plan(self, model: nn.Module, data: DataSet) -> str:
        points = self.points**self.dimensions
        told = f"{points} points × {self.n} images"
        if self.attack is None or self.threat is None:
            return f"{told} = {points * self.n:,} forward passes"
        forwards, backwards = attack_passes(model, self._examples(model, data), self.attack, self.threat, seed=0)
        return (
            f"{told}, about {points * self.n * (2 + forwards):,} forward and {points * self.n * backwards:,} backward "
            "passes"
        )

    def __call__(self, model: nn.Module, data: DataSet, part: int, *, seed: int) -> dict[str, Tensor]:
        batch, weights = self._examples(model, data), trained_weights(model, "landscape", matrices=True)
        first, second = (self._direction(weights, number, seed) for number in range(2))
        axis = torch.linspace(-self.radius, self.radius, self.points, dtype=torch.float64)
        axis[self.points // 2] = 0  # not a rounding error away from the model
        columns = axis if self.dimensions == 2 else axis.new_zeros(1)
        row = _moved(weights, axis[part].item(), first)
        losses = [self._losses(model, batch, _moved(row, beta, second), seed) for beta in columns.tolist()]
        return {
            "alpha": axis[part],
            "beta": columns,
            **{name: torch.tensor([each[name] for each in losses], dtype=torch.float64) for name in losses[0]},
        }

    def _examples(self, model: nn.Module, data: DataSet) -> Batch:
        return first_examples(data, self.split, self.n, "landscape.n").to(device_of(model))

    def _direction(self, weights: Weights, number: int, seed: int) -> Weights:
        return filter_normalised(random_direction(weights, rng.normal, seed, "landscape", number), weights)

    def _losses(self, model: nn.Module, batch: Batch, weights: Weights, seed: int) -> dict[str, float]:
        losses = {"clean": WeightLoss(model, batch, self.batch)(weights)}
        if self.attack is not None and self.threat is not None:
            parts = batch.chunk(-(-self.n // self.batch))
            at = AtWeights(model, weights)
            attacked = Batch.cat([adversarial(at, part, self.attack, self.threat, seed=seed) for part in parts])
            losses["adversarial"] = WeightLoss(model, attacked, self.batch)(weights)
        return losses


def _moved(weights: Weights, length: float, direction: Weights) -> Weights:
    return {name: weight + length * direction[name] for name, weight in weights.items()}

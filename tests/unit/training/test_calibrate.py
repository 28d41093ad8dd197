"""This machine's rate, on a clock that only the training steps move."""

from __future__ import annotations

import pytest
from torch import nn

from bastion.models import checkpoint
from bastion.recipe import Recipe
from bastion.training import calibrate as module
from bastion.training.calibrate import Rate, calibrate
from bastion.training.objectives.standard import Standard
from bastion.types import Batch, DataSet, Example

RECIPE = {"data": "cifar10", "model": "vit/micro", "objective": "standard", "batch": 48}


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Slow(Standard):
    """Takes `overhead` seconds for a batch and `each` for an image; the first batch ten times as long."""

    def __init__(self, clock: Clock, overhead: float, each: float) -> None:
        super().__init__()
        self.clock, self.overhead, self.each, self.sizes = clock, overhead, each, list[int]()

    def prepare(self, model: nn.Module, batch: Batch, *, progress: float, seed: int) -> Example:
        assert progress > 0, "an attack's radius may still be 0 at the start of a run"
        self.clock.now += (self.overhead + self.each * len(batch.x)) * (1 if self.sizes else 10)
        self.sizes.append(len(batch.x))
        return super().prepare(model, batch, progress=progress, seed=seed)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tiny_model: nn.Module) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "build_model", lambda *_: tiny_model)
    return clock


def test_the_rate_is_that_of_the_recipes_batch_size(clock: Clock, tiny_data: DataSet) -> None:
    objective = Slow(clock, overhead=0.02, each=0.001)
    rate = calibrate(Recipe.model_validate(RECIPE), objective, tiny_data, 1e12, seconds=10)
    assert rate == Rate(pytest.approx(48 / 0.068), 48)  # type: ignore[arg-type]
    assert objective.sizes[:8] == [2, 2, 4, 8, 16, 32, 48, 48]
    assert clock.now <= 10


def test_light_work_begins_with_larger_batches(clock: Clock, tiny_data: DataSet) -> None:
    objective = Slow(clock, overhead=0.02, each=0.001)
    calibrate(Recipe.model_validate(RECIPE), objective, tiny_data, 1e9, seconds=10)
    assert objective.sizes[:4] == [20, 20, 40, 48]
    calibrate(Recipe.model_validate(RECIPE), objective, tiny_data, 1e6, seconds=10)
    assert objective.sizes[-1] == 48


def test_a_hiccup_does_not_count(clock: Clock, tiny_data: DataSet) -> None:
    class Hiccup(Slow):
        def prepare(self, model: nn.Module, batch: Batch, *, progress: float, seed: int) -> Example:
            self.clock.now += 1.0 if len(self.sizes) % 5 == 0 else 0.0
            return super().prepare(model, batch, progress=progress, seed=seed)

    rate = calibrate(Recipe.model_validate(RECIPE), Hiccup(clock, 0, 0.001), tiny_data, 1e6, seconds=10)
    assert rate.images == pytest.approx(1000)


def test_parts_of_a_batch_are_tried_as_they_are_trained(clock: Clock, tiny_data: DataSet) -> None:
    recipe = Recipe.model_validate(RECIPE | {"accumulate": 4})
    assert calibrate(recipe, Slow(clock, 0, 0.001), tiny_data, 1e12, seconds=10).batch == 12


def test_a_slow_model_is_tried_in_smaller_batches(clock: Clock, tiny_data: DataSet) -> None:
    objective = Slow(clock, overhead=0, each=0.1)
    rate = calibrate(Recipe.model_validate(RECIPE), objective, tiny_data, 1e12, seconds=10)
    assert rate == Rate(pytest.approx(10), 16)  # type: ignore[arg-type]
    assert clock.now <= 10


def test_one_step_is_enough_if_it_takes_all_the_time(clock: Clock, tiny_data: DataSet) -> None:
    objective = Slow(clock, overhead=0, each=5)
    assert calibrate(Recipe.model_validate(RECIPE), objective, tiny_data, 1e12, seconds=10) == Rate(0.02, 2)
    assert objective.sizes == [2]


def test_the_recipes_own_model_is_tried_and_left_without_gradients(
    tiny_data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    def build(recipe: Recipe, data: DataSet) -> nn.Module:
        spec = {"name": "vit/micro", "img_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 1, "num_classes": 3}
        built.append(checkpoint.build(spec, mean=data.mean, std=data.std))
        return built[0]

    monkeypatch.setattr(module, "build_model", build)
    assert calibrate(Recipe.model_validate(RECIPE), Standard(), tiny_data, 1e12, seconds=0.05).images > 0
    assert built[0].training
    assert all(parameter.grad is None for parameter in built[0].parameters())

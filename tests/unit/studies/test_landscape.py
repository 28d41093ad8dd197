"""Losses around weights: directions of the right lengths, known losses, and a model that stays as it is."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from tests.vits import small_vit
from torch import Tensor, nn

from bastion import Threat, memory, rng
from bastion.attacks.pgd import fgsm
from bastion.data.arrays import ArraySplit
from bastion.errors import BastionError
from bastion.measuring import runner
from bastion.measuring.runner import measure
from bastion.models import Classifier
from bastion.models.checkpoint import digest
from bastion.settings import SettingsError
from bastion.studies import landscape
from bastion.studies.complexity import peak_memory
from bastion.studies.landscape import Landscape
from bastion.studies.weight_space import filter_normalised, random_direction, trained_weights
from bastion.types import DataSet

SMALL = Landscape(points=3, n=24, batch=10)


def rows(study: Landscape, model: nn.Module, data: DataSet, seed: int = 0) -> dict[str, Tensor]:
    parts = [study(model, data, part, seed=seed) for part in range(study.parts(model, data))]
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


def linear(weight: Tensor) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(weight.shape[1], len(weight)))
    with torch.no_grad():
        model[1].weight.copy_(weight)
        model[1].bias.zero_()
    return model.double()


@pytest.fixture
def both_ways(tiny_data: DataSet) -> DataSet:
    """Two classes, each image once in either of them; pixels far enough from black and white for attacks."""
    pixels = np.random.default_rng(0).integers(60, 200, (8, 8, 8, 3), dtype=np.uint8)
    split = ArraySplit(np.concatenate([pixels, pixels]), np.repeat(np.arange(2, dtype=np.uint8), 8))
    return DataSet(**{**vars(tiny_data), "classes": ("a", "b"), "train": split, "val": split, "test": split})


def in_double(batch: Any) -> Any:
    return batch._replace(x=batch.x.double())


@pytest.mark.parametrize("make", [small_vit, lambda: nn.Conv2d(3, 5, 3)], ids=["vit", "convolution"])
def test_each_filter_of_a_direction_is_as_long_as_that_of_the_weights(make: Any) -> None:
    model = make()
    with torch.no_grad():
        next(parameter for parameter in model.parameters() if parameter.ndim > 1)[0] = 0  # a filter that is not there
    weights = trained_weights(model, "test", matrices=True)
    direction = filter_normalised(random_direction(weights, rng.normal, 0, "d", 0), weights)
    assert direction.keys() == {name for name, each in model.named_parameters() if each.ndim > 1}
    for name, weight in weights.items():
        own, other = (each.flatten(1).norm(dim=1) for each in (weight, direction[name]))
        assert torch.allclose(own, other, rtol=1e-5)


def test_directions_are_the_seeds_and_not_along_each_other() -> None:
    weights = trained_weights(small_vit(), "test", matrices=True)
    first, again, second, other = (
        torch.cat([part.flatten() for part in random_direction(weights, rng.normal, seed, "d", number).values()])
        for seed, number in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert torch.equal(first, again)
    for each in (second, other):
        assert abs(torch.dot(first, each) / (first.norm() * each.norm())) < 5 / math.sqrt(len(first))


def test_the_middle_is_the_loss_of_the_model(tiny_model: Classifier, tiny_data: DataSet) -> None:
    found = rows(SMALL, tiny_model, tiny_data)
    assert found["clean"].shape == (3, 3)
    assert found["alpha"].tolist() == [-1, 0, 1] and found["beta"][0].tolist() == [-1, 0, 1]
    batch = tiny_data.train.batch(range(24))
    tiny_model.eval()
    assert found["clean"][1, 1].item() == pytest.approx(F.cross_entropy(tiny_model(batch.x), batch.y).item(), rel=1e-6)
    assert found["clean"].unique().numel() == 9


def test_one_dimension_is_the_middle_column_of_two(tiny_model: Classifier, tiny_data: DataSet) -> None:
    line = rows(Landscape(dimensions=1, points=3, n=24, batch=10), tiny_model, tiny_data)
    assert torch.equal(line["clean"][:, 0], rows(SMALL, tiny_model, tiny_data)["clean"][:, 1])


def test_a_linear_models_loss_is_symmetric_where_it_cannot_tell_two_classes(both_ways: DataSet) -> None:
    model = linear(torch.full((2, 192), 0.1))  # both rows alike, so only the direction decides
    study = Landscape(points=5, n=16, batch=16)
    found = rows(study, model.float(), both_ways)["clean"]
    assert found[2, 2].item() == pytest.approx(math.log(2))
    assert torch.allclose(found, found.flip(0, 1), rtol=1e-6)
    assert (found >= math.log(2) - 1e-9).all()


def test_a_linear_models_loss_is_convex_along_every_row(tiny_data: DataSet) -> None:
    weight = torch.randn(3, 192, generator=torch.Generator().manual_seed(0)) / 10
    found = rows(Landscape(points=7, n=24), linear(weight).float(), tiny_data)["clean"]
    for values in (found, found.T):
        assert (values[2:] - 2 * values[1:-1] + values[:-2] > 0).all()


def test_the_loss_under_attack_is_that_of_the_linear_optimum_at_every_point(both_ways: DataSet) -> None:
    eps, study = 0.05, Landscape(points=3, n=16, threat=Threat("linf", 0.05), attack=fgsm())
    model = linear(torch.randn(2, 192, generator=torch.Generator().manual_seed(0)) / 10).float()
    found = rows(study, model, both_ways)
    weights = trained_weights(model, "test", matrices=True)
    first, second = (study._direction(weights, number, 0)["1.weight"] for number in range(2))
    batch = both_ways.train.batch(range(16))
    sides = torch.where(batch.y == 0, 1.0, -1.0)
    for row, alpha in enumerate((-1, 0, 1)):
        for column, beta in enumerate((-1, 0, 1)):
            moved = weights["1.weight"] + alpha * first + beta * second
            lead = sides * (batch.x.flatten(1) @ (moved[0] - moved[1])) - eps * (moved[0] - moved[1]).abs().sum()
            assert found["adversarial"][row, column].item() == pytest.approx(F.softplus(-lead).mean().item(), rel=1e-5)
    assert (found["adversarial"] > found["clean"]).all()


@pytest.mark.parametrize("trouble", [KeyboardInterrupt, RuntimeError])
def test_the_weights_stay_bit_for_bit_whatever_happens(
    tiny_model: Classifier, tiny_data: DataSet, trouble: type[BaseException]
) -> None:
    """Also BatchNorm's statistics, gradients and the mode, with a pass that is cut short in the middle."""
    before, parameters, calls = digest(tiny_model), list(tiny_model.parameters()), []
    tiny_model.train()

    def interrupt(*_: object) -> None:
        calls.append(1)
        if len(calls) == 5:
            raise trouble("stop")

    tiny_model.network[3].register_forward_hook(interrupt)  # type: ignore[index, union-attr, operator]
    study = Landscape(points=3, n=24, batch=10, threat=Threat("linf", 0.05), attack=fgsm())
    with pytest.raises(trouble):
        study(tiny_model, tiny_data, 0, seed=0)
    assert len(calls) == 5
    assert digest(tiny_model) == before
    assert all(now is then for now, then in zip(tiny_model.parameters(), parameters, strict=True))
    assert all(each.grad is None and each.requires_grad for each in parameters)
    assert all(module.training for module in tiny_model.modules())


def test_it_is_measured_row_by_row(tiny_model: Classifier, tiny_data: DataSet, tmp_path: Any) -> None:
    suite = {"studies": {"loss": {"name": "landscape", "points": 3, "n": 24}}}
    facts = measure(tiny_model, tiny_data, suite, folder=tmp_path)
    assert facts.case("loss").n == 3
    assert facts.studies()["loss"]["clean"].shape == (3, 3)


def test_the_plan_counts_passes(tiny_model: Classifier, tiny_data: DataSet) -> None:
    assert Landscape(n=48).cost(tiny_model, tiny_data) == "441 points × 48 images = 21,168 forward passes"
    attacked = Landscape(points=3, n=10, threat=Threat("linf", 0.1), attack=fgsm())
    assert attacked.cost(tiny_model, tiny_data).endswith("about 360 forward and 90 backward passes")


def test_the_plan_is_told_at_a_terminal_before_the_first_part(
    tiny_model: Classifier, tiny_data: DataSet, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = {"studies": {"loss": {"name": "landscape", "points": 3, "n": 24}}}
    plan = "loss: 9 points × 24 images = 216 forward passes; 3 of 3 parts to do\n"
    for terminal, told in ((False, ""), (True, plan)):
        said = io.StringIO()
        shown = Console(file=said, force_terminal=terminal, width=200, highlight=False)
        monkeypatch.setattr(runner, "console", shown)
        measure(tiny_model, tiny_data, suite, folder=tmp_path / str(terminal))
        assert said.getvalue() == told
        measure(tiny_model, tiny_data, suite, folder=tmp_path / str(terminal))
        assert said.getvalue() == told  # nothing is left to do


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"points": 4}, "points must be odd, so that the model is one of them, got 4"),
        ({"threat": Threat("linf", 0.1)}, "needs both `threat` and `attack`"),
        ({"dimensions": 3}, "dimensions"),
        ({"points": 1}, "points"),
    ],
)
def test_wrong_settings_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Landscape(**settings)


def test_what_cannot_be_looked_at_says_why(tiny_model: Classifier, tiny_data: DataSet) -> None:
    with pytest.raises(BastionError, match=r"landscape\.n: the train split of tiny has 48 images, got 256"):
        Landscape()(tiny_model, tiny_data, 0, seed=0)
    with pytest.raises(BastionError, match="landscape: no parameter of two or more dimensions of Classifier is"):
        SMALL(tiny_model.requires_grad_(False), tiny_data, 0, seed=0)


ATTACKED = Landscape(points=3, n=24, batch=10, threat=Threat("linf", 0.1), attack=fgsm())


@pytest.mark.parametrize("study", [SMALL, ATTACKED], ids=["clean", "attacked"])
def test_what_does_not_fit_is_refused_before_it_starts(
    study: Landscape, tiny_model: Classifier, tiny_data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_available", lambda device: 2**10)
    with pytest.raises(BastionError, match="landscape: 3 copies of the weights and 10 images at once: needs 0.0 GiB"):
        study(tiny_model, tiny_data, 0, seed=0)


@pytest.mark.parametrize(("width", "depth", "study"), [(500, 2, SMALL), (100, 20, SMALL), (10, 40, ATTACKED)])
def test_the_memory_that_is_asked_for_is_what_is_used(
    width: int, depth: int, study: Landscape, tiny_data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One large tensor, of which drawing takes most; many small ones; and the graph of an attack."""
    asked: list[int] = []
    monkeypatch.setattr(landscape, "check_memory", lambda needed, *_: asked.append(needed))
    inner = [each for _ in range(depth) for each in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, width), *inner, nn.Linear(width, 3))
    used = peak_memory(lambda: study(model, tiny_data, 0, seed=0), torch.device("cpu"))
    assert 0.7 * used < asked[0] < 1.5 * used

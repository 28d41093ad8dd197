"""A model is recognised: by weights, by what its modules are, and by answers that agree but for rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx
from tests.shifted import Shifted
from torch import Tensor, nn

from bastion import storage
from bastion.measuring.identity import Identity, identify
from bastion.models import Classifier, checkpoint
from bastion.run import Run
from bastion.types import DataSet

GOLDEN = Path(__file__).parents[2] / "golden" / "identity.json"


@pytest.fixture
def of(tiny_data: DataSet) -> Callable[[nn.Module], Identity]:
    return lambda model: identify(model, tiny_data, "test")


class Wrapped(nn.Module):
    """Networks with the same weights and nearly the same answers."""

    def __init__(self, network: nn.Module, *, scale: float = 1.0, levels: int = 0, straight: bool = False) -> None:
        super().__init__()
        self.network, self.scale, self.levels, self.straight = network, scale, levels, straight

    def forward(self, x: Tensor) -> Tensor:
        rounded = (self.levels * x).round() / self.levels if self.levels else x
        return self.scale * self.network(x + (rounded - x).detach() if self.straight else rounded)


def test_a_copy_is_the_same_model(of: Any, tiny_model: Classifier) -> None:
    assert of(tiny_model).matches(of(copy.deepcopy(tiny_model)))
    assert of(Shifted()).matches(of(Shifted()))


def test_training_mode_is_no_part_of_a_model(of: Any, tiny_model: Classifier) -> None:
    assert of(tiny_model.train()).matches(of(copy.deepcopy(tiny_model).eval()))


def test_other_weights_are_another_model(of: Any, tiny_model: Classifier) -> None:
    before = of(tiny_model)
    with torch.no_grad():
        tiny_model.network[0].weight[0, 0, 0, 0] += 1e-6
    assert not of(tiny_model).matches(before)


@pytest.mark.parametrize(
    ("one", "other"),
    [({"levels": 16}, {"levels": 16, "straight": True}), ({}, {"levels": 4000}), ({}, {"scale": 1e5})],
)
def test_models_that_differ_in_their_gradients_alone_are_told_apart(
    of: Any, tiny_model: Classifier, one: dict[str, Any], other: dict[str, Any]
) -> None:
    first, second = of(Wrapped(tiny_model, **one)), of(Wrapped(tiny_model, **other))
    assert not first.matches(second)


def test_rounding_makes_no_other_model(of: Any, tiny_model: Classifier) -> None:
    identity = of(tiny_model)
    rounded = Identity(
        identity.weights,
        identity.data,
        identity.modules,
        [[value * (1 + 1e-5) for value in row] for row in identity.logits],
        [[value * (1 + 1e-4) for value in row] for row in identity.slopes],
    )
    assert identity.matches(rounded)


def test_a_model_on_other_data_is_kept_apart(tiny_model: Classifier, tiny_data: DataSet) -> None:
    from dataclasses import replace

    ours, other = (identify(tiny_model, replace(tiny_data, fingerprint=name), "test") for name in "ab")
    assert not ours.matches(other)
    assert not identify(tiny_model, tiny_data, "val").matches(identify(tiny_model, tiny_data, "test"))


def test_a_run_keeps_one_folder_for_each_model(of: Any, tmp_path: Path) -> None:
    run = Run(tmp_path)
    one, two = of(Shifted()), of(Shifted(1))
    assert one.folder(run) == of(Shifted()).folder(run)
    assert one.folder(run) != two.folder(run)
    # Equal in all but the answers: the folder's name alone would not tell them apart.
    other = Identity(one.weights, one.data, one.modules, [[-v for v in row] for row in one.logits], one.slopes)
    assert other.folder(run) == one.folder(run).with_name(f"{one.folder(run).name}-2")
    assert other.folder(run) == other.folder(run)


def test_processes_that_start_together_take_the_same_folder(of: Any, tmp_path: Path) -> None:
    """A folder without its file is one that another process is about to write."""
    run, identity = Run(tmp_path), of(Shifted())
    (tmp_path / "facts" / storage.fingerprint([identity.weights, identity.data, identity.modules])).mkdir(parents=True)
    assert identity.folder(run) == identity.folder(run)
    assert len(list((tmp_path / "facts").iterdir())) == 1


def test_models_of_the_registry_are_recognised(tiny_data: DataSet) -> None:
    spec = {"name": "vit/micro", "img_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    first, again, other = (
        identify(checkpoint.build(spec | more, mean=(0.5,) * 3, std=(0.5,) * 3), tiny_data, "test")
        for more in ({}, {}, {"num_heads": 4})
    )
    assert first.matches(again)
    assert first.weights == other.weights
    assert not first.matches(other)


@pytest.mark.parametrize("more", [{}, {"map_to": ""}], ids=["first", "with another field of blocks"])
def test_facts_of_older_versions_are_found(tiny_data: DataSet, tmp_path: Path, more: dict[str, str]) -> None:
    """Of a ViT, whose identity is stored as bastion 0.1.0 wrote it."""
    spec = {"name": "vit/micro", "img_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    model = checkpoint.build(spec, mean=(0.4,) * 3, std=(0.2,) * 3)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_((torch.arange(each.numel()).remainder(7) / 8 - 0.25).view_as(each))
    stored = storage.read_json(GOLDEN)
    stored["modules"][""]["_blocks"][0]["holds"] |= more
    storage.write_json(tmp_path / "facts" / "older" / "identity.json", stored)
    assert identify(model, tiny_data, "test").folder(Run(tmp_path)).name == "older"

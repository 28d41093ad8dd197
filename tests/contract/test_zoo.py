"""Every model of the zoo loads, is small, comes from the recipe beside it, and is as good as that says."""

from __future__ import annotations

import pytest
import torch

import bastion
from bastion import Threat
from bastion.attacks.apgd import APGD
from bastion.attacks.ensemble import Ensemble
from bastion.attacks.fab import FAB
from bastion.attacks.judge import judge
from bastion.attacks.pgd import PGD
from bastion.data import datasets
from bastion.models import checkpoint
from bastion.models.load import locate, zoo_names
from bastion.recipe import load_recipe


def test_the_zoo_has_a_transformer_and_a_cnn() -> None:
    assert {"zoo/cifar10-linf-resnet", "zoo/cifar10-linf-vit"} <= set(zoo_names())


@pytest.mark.parametrize("name", zoo_names())
class TestZoo:
    def test_it_is_small_and_comes_from_its_recipe(self, name: str) -> None:
        folder = locate(name)
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 3_000_000
        assert checkpoint.read_card(folder).about["recipe"] == load_recipe(name).hash()

    def test_it_is_as_good_as_its_recipe_says(self, name: str) -> None:
        """On 200 images; four standard deviations of a proportion are 14 points at most."""
        expect = load_recipe(name).expect
        batch = datasets.build("cifar10-mini").test.batch(range(200))
        verdict = judge(bastion.load(name), batch, PGD(steps=10), Threat("linf", 8 / 255), seed=0)
        robust = verdict.clean & ~verdict.fooled
        assert abs(verdict.clean.double().mean().item() - expect["clean"]) < 0.14
        assert abs(robust.double().mean().item() - expect["pgd-10"]) < 0.14
        assert torch.equal(verdict.inside, torch.ones(200, dtype=torch.bool))


def test_verdicts_depend_on_the_batching_through_rounding_only() -> None:
    """In float32: of 60 images attacked at once and in parts, at most one gets another verdict."""
    model, threat = bastion.load("zoo/cifar10-linf-vit"), Threat("linf", 8 / 255)
    batch = datasets.build("cifar10-mini").test.batch(range(60))
    attack = Ensemble(members=(APGD(steps=10), APGD(steps=5, loss="dlr", targets=3), FAB(steps=5, targets=2)))
    whole = judge(model, batch, attack, threat, seed=0).fooled
    order = torch.arange(60).flip(0)
    parts = [judge(model, batch.select(part), attack, threat, seed=0).fooled for part in order.split((1, 7, 22, 30))]
    assert whole.sum() > 9
    assert (whole[order] != torch.cat(parts)).sum() <= 1

"""Recipes are data: merged, changed, checked and hashed without running anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from bastion import BastionError
from bastion.attacks import PGD, attacks
from bastion.recipe import Recipe, differences, load_recipe
from bastion.recipe_yaml import dump, read


def test_changes_reach_into_the_recipe() -> None:
    recipe = load_recipe("base/micro", ["optimizer.lr=2e-3", "model.depth=2", "objective.label_smoothing=1/4"])
    assert recipe.optimizer.lr == 2e-3
    assert recipe.optimizer.weight_decay == 0.05
    assert recipe.model.plain()["depth"] == 2
    assert recipe.objective.plain()["label_smoothing"] == 0.25


def test_another_plug_in_does_not_inherit_the_parameters_of_the_old_one() -> None:
    recipe = load_recipe("base/micro", ["objective.name=adversarial", "objective.attack.name=pgd", "data.root=x"])
    assert recipe.objective.plain() == {"name": "adversarial", "attack": {"name": "pgd"}}
    assert recipe.data.plain() == {"name": "cifar10-mini", "root": "x"}  # the short form takes parameters too


def test_a_plug_in_with_its_parameters_may_be_one_word(tmp_path: Path) -> None:
    spec = {"name": "imagefolder", "root": "/a", "size": 32}
    one = load_recipe("base/micro", ["data=imagefolder:root=/a,size=32"])
    assert one.data.plain() == spec and one.hash() == load_recipe("base/micro", {"data": spec}).hash()
    assert load_recipe("base/micro", ["data=imagefolder:root=/a", "data.size=32"]).data.plain() == spec
    folder = load_recipe("base/micro", [f"data={tmp_path}"]).data
    assert folder.plain() == {"name": "imagefolder", "root": str(tmp_path)}
    attacked = load_recipe("base/micro", ["objective=standard", "validate.attack=pgd:steps=5,step=2/255"]).validate_
    assert attacked.attack is not None and attacked.attack.plain() == {"name": "pgd", "steps": 5, "step": 2 / 255}
    assert attacks.build("pgd:steps=5") == PGD(steps=5)
    for wrong in ("pgd:steps", "pgd:name=fab", "pgd:steps=1,steps=2"):
        with pytest.raises(BastionError, match=f"'{wrong}': expected NAME:key=value,key=value, got"):
            attacks.build(wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimiser.lr=1", "base/micro: optimiser: unknown key; did you mean 'optimizer'"),
        ("optimizer.lrr=1", "optimizer.lrr: unknown key; did you mean 'lr'"),
        ("validate.evry=1", "validate.evry: unknown key; did you mean 'every'"),
        ("init={frm: zoo/x}", "init.frm: unknown key; did you mean 'from'"),
        ("optimizer.perturb={name: sam, siz: 1}", "optimizer.perturb.siz: unknown key; did you mean 'size'"),
        ("extra=[{data: cifar10, shar: 0.5}]", "extra.0.shar: unknown key; did you mean 'share'"),
        ("optimizer.lr=fast", "optimizer.lr: expected a number, got 'fast'"),
        ("optimizer.lr=-1", "optimizer.lr: input should be greater than 0, got -1"),
        ("batch=0", "batch: input should be greater than or equal to 1"),
        ("ema=1.5", "ema: input should be less than 1"),
        ("augment.crop=big", "augment.crop: unknown crop 'big'; known: none, pad, resized"),
        ("precision=fp16", "precision: unknown precision 'fp16'; did you mean 'bf16'"),
        ("model=7", "model: input should be a valid dictionary"),
    ],
)
def test_mistakes_are_named_with_their_path(change: str, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        load_recipe("base/micro", [change])


def test_a_resolved_recipe_reads_back_as_itself() -> None:
    recipe = load_recipe("tiny/demo-robust")
    again = Recipe.model_validate(read(dump(recipe.resolved()), "here"))
    assert again == recipe
    assert again.hash() == recipe.hash()


def test_the_hash_is_of_what_decides_the_weights() -> None:
    base = load_recipe("base/micro")
    for non_hashed in ("about=hello", "workers=3", "log_every=1", "checkpoint.minutes=1", "expect.clean=1"):
        assert load_recipe("base/micro", [non_hashed]).hash() == base.hash()
    for hashed in ("seed=1", "optimizer.lr=2e-3", "model.depth=5", "augment.hflip=0", "train_limit=5"):
        assert load_recipe("base/micro", [hashed]).hash() != base.hash()


def test_differences_name_each_value_that_changed() -> None:
    old = {"a": {"b": 1, "c": 2}, "d": 3}
    assert differences(old, {"a": {"b": 1, "c": 5}, "e": 4}) == ["a.c: 2 -> 5", "d: 3 -> None", "e: None -> 4"]


def test_another_schedule_or_optimizer_keeps_the_other_values() -> None:
    """They are sections with one set of keys, not plug-ins with keys of their own."""
    recipe = load_recipe("xcit/s12", ("schedule.name=constant", "optimizer.name=sgd"))
    before = load_recipe("xcit/s12")
    assert recipe.schedule == before.schedule.model_copy(update={"name": "constant"})
    assert recipe.optimizer == before.optimizer.model_copy(update={"name": "sgd"})

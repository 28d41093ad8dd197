"""Recipes are data: merged, changed, checked and hashed without running anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bastion import BastionError
from bastion.recipe import Recipe, differences, dump, load_recipe, merge, read
from bastion.suite import load_suite


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8/255", 8 / 255),
        ("1e-3", 1e-3),
        ("-2E+4", -2e4),
        ("1.5e2", 150.0),
        (".5/2", 0.25),
        ("1e-3/2", 5e-4),
        ("12", 12),
        ("on", "on"),
        ("no", "no"),
        ("true", True),
        ("False", False),
        ("1/2/3", "1/2/3"),
        ("a/b", "a/b"),
        ("timm/vit_tiny_patch16_224", "timm/vit_tiny_patch16_224"),
        ("'8/255'", "8/255"),
        ("rand-m9-mstd0.5-inc1", "rand-m9-mstd0.5-inc1"),
    ],
)
def test_fractions_and_exponents_are_numbers(text: str, value: object) -> None:
    assert read(f"x: {text}", "here")["x"] == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "here: not valid YAML"),
        ("- a", "here: expected keys and values, got list"),
        ("a: 1\nb: 2\na: 3", "the key 'a' is given twice"),
        ("a: 1/0", "1/0 divides by zero"),
        ("a: !!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_bad_yaml_is_refused(text: str, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        read(text, "here")


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


def test_a_child_overrides_its_parents_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("about: parent\nextends: base/micro\nseed: 1\nbatch: 16\n")
    (tmp_path / "b.yaml").write_text("batch: 8\n")
    (tmp_path / "c.yaml").write_text("extends: [a.yaml, b.yaml]\nseed: 2\n")
    recipe = load_recipe(tmp_path / "c.yaml")
    assert (recipe.seed, recipe.batch, recipe.model.name) == (2, 8, "vit/micro")
    assert recipe.about == ""  # what is said of a parent is not true of its child


def test_extending_in_a_circle_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(BastionError, match="goes round in a circle: a -> b -> a"):
        load_recipe(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimiser.lr=1", "base/micro: optimiser: unknown key; did you mean 'optimizer'"),
        ("optimizer.lrr=1", "optimizer.lrr: unknown key; did you mean 'lr'"),
        ("validate.evry=1", "validate.evry: unknown key; did you mean 'every'"),
        ("init={frm: zoo/x}", "init.frm: unknown key; did you mean 'from'"),
        ("optimizer.perturb={name: sam, siz: 1}", "optimizer.perturb.siz: unknown key; did you mean 'size'"),
        ("extra=[{data: cifar10, shar: 0.5}]", "extra.0.shar: unknown key; did you mean 'share'"),
        ("optimizer.lr=fast", "optimizer.lr: input should be a valid number.*got 'fast'"),
        ("optimizer.lr=-1", "optimizer.lr: input should be greater than 0, got -1"),
        ("batch=0", "batch: input should be greater than or equal to 1"),
        ("ema=1.5", "ema: input should be less than 1"),
        ("augment.crop=big", "augment.crop: input should be 'pad', 'resized' or 'none'"),
        ("precision=fp16", "precision: input should be 'fp32' or 'bf16'"),
        ("model=7", "model: input should be a valid dictionary"),
        ("lr", "--set lr: expected KEY.KEY=VALUE"),
        ("a..b=1", "--set a..b=1: expected KEY.KEY=VALUE"),
        ("seed=[", "--set seed=.: not valid YAML"),
    ],
)
def test_mistakes_are_named_with_their_path(change: str, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        load_recipe("base/micro", [change])


def test_unknown_recipes_and_suites_suggest_the_nearest() -> None:
    with pytest.raises(BastionError, match="no recipe 'tiny/demo-robus'.*did you mean 'tiny/demo-robust'"):
        load_recipe("tiny/demo-robus")
    with pytest.raises(BastionError, match="no suite 'dem'.*did you mean 'demo'"):
        load_suite("dem")
    with pytest.raises(BastionError, match="no recipe '/nowhere/x.yaml'"):
        load_recipe("/nowhere/x.yaml")


def test_a_resolved_recipe_reads_back_as_itself() -> None:
    recipe = load_recipe("tiny/demo-robust")
    again = Recipe.model_validate(read(dump(recipe.resolved()), "here"))
    assert again == recipe
    assert again.hash() == recipe.hash()


def test_the_hash_is_of_what_decides_the_weights() -> None:
    base = load_recipe("base/micro")
    for idle in ("about=hello", "workers=3", "log_every=1", "checkpoint.minutes=1", "expect.clean=1"):
        assert load_recipe("base/micro", [idle]).hash() == base.hash()
    for deciding in ("seed=1", "optimizer.lr=2e-3", "model.depth=5", "augment.hflip=0", "train_limit=5"):
        assert load_recipe("base/micro", [deciding]).hash() != base.hash()


def test_differences_name_each_value_that_changed() -> None:
    old = {"a": {"b": 1, "c": 2}, "d": 3}
    assert differences(old, {"a": {"b": 1, "c": 5}, "e": 4}) == ["a.c: 2 -> 5", "d: 3 -> None", "e: None -> 4"]


trees = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
).filter(lambda tree: isinstance(tree, dict))


@given(trees, trees)
def test_merging_keeps_everything_of_the_newer(old: dict[str, object], new: dict[str, object]) -> None:
    def within(part: object, whole: object) -> bool:
        if isinstance(part, dict) and isinstance(whole, dict):
            return all(key in whole and within(value, whole[key]) for key, value in part.items())
        return part == whole

    merged = merge(old, new)
    assert within(new, merged)
    assert merge(merged, new) == merged
    assert old.keys() | new.keys() == merged.keys()


def test_another_schedule_or_optimizer_keeps_the_other_values() -> None:
    """They are sections with one set of keys, not plug-ins with keys of their own."""
    recipe = load_recipe("xcit/s12", ("schedule.name=constant", "optimizer.name=sgd"))
    before = load_recipe("xcit/s12")
    assert recipe.schedule == before.schedule.model_copy(update={"name": "constant"})
    assert recipe.optimizer == before.optimizer.model_copy(update={"name": "sgd"})

"""Recipes are laid over one another, key by key, as the schema says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bastion import BastionError
from bastion.errors import printable
from bastion.recipe import Recipe, load_recipe
from bastion.recipe_files import headlines, is_recipe, merge, parse_changes, shipped
from bastion.recipe_yaml import read
from bastion.suite import Suite, load_suite


@pytest.mark.parametrize(
    ("old", "new", "merged"),
    [
        # plug-ins: another name takes nothing over, the same or none does
        ("model: {name: a, depth: 1}", "model: {name: b}", "model: {name: b}"),
        ("model: {name: a, depth: 1}", "model: {width: 2}", "model: {name: a, depth: 1, width: 2}"),
        ("model: a", "model: {depth: 1}", "model: {name: a, depth: 1}"),
        ("model: a", "model: {name: b, depth: 1}", "model: {name: b, depth: 1}"),
        ("model: {name: a, depth: 1}", "model: a", "model: a"),
        ("model: {depth: 1}", "model: a", "model: {depth: 1, name: a}"),
        ("model: {depth: 1}", "model: {name: a}", "model: {depth: 1, name: a}"),
        ("validate: {attack: a}", "validate: {attack: {steps: 2}}", "validate: {attack: {name: a, steps: 2}}"),
        (
            "objective: {name: x, attack: {name: a, steps: 1}}",
            "objective: {attack: {name: b}}",
            "objective: {name: x, attack: {name: b}}",
        ),
        # sections: whatever their name
        ("optimizer: {name: sgd, lr: 1}", "optimizer: {name: adamw}", "optimizer: {name: adamw, lr: 1}"),
        ("schedule: {epochs: 2}", "schedule: {name: steps}", "schedule: {epochs: 2, name: steps}"),
        # but for one that must have a name
        (
            "optimizer: {perturb: {name: sam, size: 1}}",
            "optimizer: {perturb: {name: awp}}",
            "optimizer: {perturb: {name: awp}}",
        ),
        # words that are no plug-ins
        ("normalize: data", "normalize: {mean: [0]}", "normalize: {mean: [0]}"),
        ("resize: bicubic", "resize: null", "resize: null"),
    ],
)
def test_the_schema_tells_what_is_replaced_and_what_is_merged(old: str, new: str, merged: str) -> None:
    assert merge(read(old, "old"), read(new, "new"), Recipe) == read(merged, "merged")


def test_probes_of_a_suite_are_plug_ins_by_label() -> None:
    old = {"probes": {"a": {"name": "x", "n": 1}, "b": "y"}}
    new = {"probes": {"a": {"name": "z"}, "b": {"n": 2}, "name": {"name": "w"}}}
    assert merge(old, new, Suite)["probes"] == {"a": {"name": "z"}, "b": {"name": "y", "n": 2}, "name": {"name": "w"}}


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


def test_a_child_overrides_its_parents_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("about: parent\nextends: base/micro\nseed: 1\nbatch: 16\n")
    (tmp_path / "b.yaml").write_text("batch: 8\n")
    (tmp_path / "c.yaml").write_text("extends: [a.yaml, b.yaml]\nseed: 2\n")
    recipe = load_recipe(tmp_path / "c.yaml")
    assert (recipe.seed, recipe.batch, recipe.model.name) == (2, 8, "vit/micro")
    assert recipe.about == ""  # what is said of a parent is not true of its child


def test_a_row_of_a_paper_can_be_extended(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: xcit/s12\nseed: 7\n")
    mine, theirs = load_recipe(tmp_path / "mine.yaml"), load_recipe("xcit/s12")
    assert mine == theirs.model_copy(update={"seed": 7, "about": "", "expect": {}})


def test_extending_in_a_circle_or_without_an_end_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(BastionError, match="goes round in a circle: a -> b -> a"):
        load_recipe(tmp_path / "a.yaml")
    for number in range(60):
        (tmp_path / f"d{number}.yaml").write_text(f"extends: d{number + 1}.yaml\n")
    with pytest.raises(BastionError, match="`extends` is more than 50 files deep: .* -> d51"):
        load_recipe(tmp_path / "d0.yaml")


def test_a_file_is_read_once_however_often_it_is_extended(tmp_path: Path) -> None:
    """Twice each time, in 40 files, would be a million million reads."""
    for number in range(40):
        (tmp_path / f"d{number}.yaml").write_text(f"extends: [d{number + 1}.yaml, d{number + 1}.yaml]\n")
    (tmp_path / "d40.yaml").write_text("extends: base/micro\nseed: 3\n")
    assert load_recipe(tmp_path / "d0.yaml").seed == 3


def test_changes_are_what_a_file_would_say() -> None:
    changes = ["optimizer.lr=2e-3", "model.depth=2", "model.name=x", "data=imagenet", "data.size=8"]
    assert parse_changes(changes, Recipe) == {
        "optimizer": {"lr": 2e-3},
        "model": {"depth": 2, "name": "x"},
        "data": {"name": "imagenet", "size": 8},
    }
    assert parse_changes({"optimizer.lr": 1, "seed": 2}) == {"optimizer": {"lr": 1}, "seed": 2}
    assert parse_changes("optimizer.lr=1/2") == {"optimizer": {"lr": 0.5}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lr", "--set lr: expected KEY.KEY=VALUE"),
        ("a..b=1", "--set a..b=1: expected KEY.KEY=VALUE"),
        ("seed=[", "--set seed=.: not valid YAML"),
        ("seed=1\nbatch: 2", r"--set 'seed=1\\nbatch: 2': a value must be on one line"),
        ("se\ned=1", r"--set 'se\\ned=1': expected KEY.KEY=VALUE"),
        ("seed=!!int x", "--set seed=!!int x: not valid YAML: 'x' is not a valid int"),
    ],
)
def test_bad_changes_are_refused(change: str, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        parse_changes([change])


def test_a_suite_takes_a_key_once() -> None:
    """`--set eps=2/255 --set eps=8/255` looks like a curve, and would be one radius."""
    with pytest.raises(BastionError, match=r"--set eps=8/255: eps is given twice; .* a list: eps=\[…,…\]"):
        load_suite("quick", ["eps=2/255", "eps=8/255"])
    assert parse_changes(["lr=1", "lr=2"]) == {"lr": 2}


def test_unknown_recipes_and_suites_suggest_the_nearest() -> None:
    with pytest.raises(BastionError, match="no recipe 'tiny/demo-robus'.*did you mean 'tiny/demo-robust'"):
        load_recipe("tiny/demo-robus")
    with pytest.raises(BastionError, match="no recipe 'xcit/s13'.*did you mean 'xcit/s12'"):
        load_recipe("xcit/s13")
    with pytest.raises(BastionError, match="no suite 'dem'.*did you mean 'demo'"):
        load_suite("dem")
    for name in ("/nowhere/x.yaml", "x" * 300, "a\0b", "xcit", "xcit/", "", "."):
        with pytest.raises(BastionError, match=f"no recipe '{printable(name)}'"):
            load_recipe(name)


def test_a_file_that_extends_what_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: [base/micro, tiny/dem]\n")
    with pytest.raises(BastionError, match=r"mine.yaml: extends: no recipe 'tiny/dem'"):
        load_recipe(tmp_path / "mine.yaml")


def test_what_is_a_recipe() -> None:
    assert all(map(is_recipe, ["tiny/mart", "xcit/s12", "base/micro", "mine.yaml"]))
    assert not any(map(is_recipe, ["xcit", "xcit/n12", "tiny", "vit/micro", "papers/xcit", "suites/demo"]))


def test_blocks_and_papers_are_no_recipes() -> None:
    folders = {name.partition("/")[0] for name in shipped("recipe")}
    assert folders == {"cauchy", "convstem", "generalization", "rspc", "tiny", "xcit", "zoo"}
    assert dict(headlines("suite"))["demo"].startswith("Clean accuracy and PGD-20")


def test_recipes_are_listed_without_torch_or_pydantic() -> None:
    """They are what takes long to import."""
    code = "import sys; from bastion.listing import listed; print(len(listed('recipes')), *sys.modules)"
    words = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert int(words[0]) == len(shipped("recipe"))
    assert not {"torch", "timm", "numpy", "pydantic"} & {*words}

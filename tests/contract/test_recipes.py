"""Every shipped recipe and suite is right, down to the parameters of each plug-in it names."""

from __future__ import annotations

import pytest

from bastion.measuring.runner import build_probes
from bastion.recipe import SHIPPED, load_recipe, load_suite, shipped
from bastion.training.trainer import build_objective

ALL = [path.relative_to(SHIPPED).with_suffix("").as_posix() for path in sorted(SHIPPED.rglob("*.yaml"))]


@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith("suites/")])
def test_recipes_name_only_what_exists(name: str) -> None:
    recipe = load_recipe(name)
    build_objective(recipe)
    assert recipe.about


@pytest.mark.parametrize("name", shipped("recipes"))
def test_recipes_say_their_command_and_what_to_expect(name: str) -> None:
    recipe = load_recipe(name)
    assert f"bastion train {name}" in recipe.about
    assert {"clean", "minutes"} <= recipe.expect.keys()


@pytest.mark.parametrize("name", shipped("suites"))
def test_suites_name_only_what_exists(name: str) -> None:
    suite = load_suite(name)
    assert suite.about
    assert build_probes(suite).keys() == suite.probes.keys()

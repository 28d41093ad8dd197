"""Editors' schemas agree with what bastion itself accepts and refuses."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from bastion.recipe import load_recipe
from bastion.recipe_files import shipped
from bastion.schema import schemas
from bastion.suite import load_suite


@pytest.fixture(scope="module")
def validators() -> dict[str, Any]:
    made = {}
    for kind, schema in schemas().items():
        jsonschema.Draft202012Validator.check_schema(schema)
        made[kind] = jsonschema.Draft202012Validator(schema)
    return made


def test_shipped_recipes_and_suites_are_valid(validators: dict[str, Any]) -> None:
    """Of recipes every seventh: those of a paper differ by a value or two."""
    resolved = {("recipe", name): load_recipe(name).resolved() for name in shipped("recipe")[::7]}
    resolved |= {("suite", name): load_suite(name).resolved() for name in shipped("suite")}
    wrong = {key: error.message for key, each in resolved.items() for error in validators[key[0]].iter_errors(each)}
    assert wrong == {}


RECIPE = {"data": "cifar10-mini", "model": {"name": "vit/micro"}, "objective": "standard"}
ADVERSARIAL = {"name": "adversarial", "threat": {"norm": "linf", "eps": "8/255"}, "attack": {"name": "pgd", "steps": 3}}


@pytest.mark.parametrize(
    ("change", "valid"),
    [
        ({}, True),
        ({"extends": "base/micro"}, True),
        ({"objective": ADVERSARIAL}, True),
        ({"objective": ADVERSARIAL | {"attack": {"name": "pgd", "stps": 3}}}, False),
        ({"objective": ADVERSARIAL | {"attack": {"name": "pgd", "steps": -3}}}, False),
        ({"objective": ADVERSARIAL | {"threat": {"norm": "l3", "eps": 0.1}}}, False),
        ({"model": {"name": "vit/micro", "depth": "six"}}, False),
        ({"model": {"name": "timm/resnet18"}}, True),
        ({"model": "vit/mikro"}, False),
        ({"optimizer": {"lr": "fast"}}, False),
        ({"optimzer": {}}, False),
    ],
)
def test_mistakes_show_in_the_editor(validators: dict[str, Any], change: dict[str, Any], valid: bool) -> None:
    assert validators["recipe"].is_valid(RECIPE | change) is valid

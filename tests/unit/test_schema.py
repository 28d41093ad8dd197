"""Editors' schemas agree with what bastion itself accepts and refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from bastion.errors import BastionError
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": {"lr": 1e-3}}, None),
        ({"optimizer": {"lr": "8/255"}}, None),
        ({"optimizer": {"lr": 1}}, None),
        ({"batch": 5e3}, None),  # YAML's, a whole number
        ({"optimizer": {"clip_grad": None}}, None),
        ({"optimizer": {"lr": True}}, "optimizer.lr: expected a number, got True"),
        ({"optimizer": {"weight_decay": True}}, "optimizer.weight_decay: expected a number, got True"),
        ({"optimizer": {"clip_grad": True}}, "optimizer.clip_grad: expected a number, got True"),
        ({"optimizer": {"betas": [0.9, True]}}, "optimizer.betas.1: expected a number, got True"),
        ({"optimizer": {"lr": "1e-3"}}, "optimizer.lr: expected a number, got '1e-3'"),
        ({"optimizer": {"lr": 0}}, "optimizer.lr: input should be greater than 0, got 0.0"),
        ({"optimizer": {"nesterov": "yes"}}, "optimizer.nesterov: expected true or false, got 'yes'"),
        ({"validate": {"limit": True}}, "validate.limit: expected a whole number, got True"),
        ({"normalize": {"mean": [True], "std": [1]}}, "normalize.mean.0: expected a number, got True"),
        ({"batch": True}, "batch: expected a whole number, got True"),
        ({"batch": "64"}, "batch: expected a whole number, got '64'"),
        ({"batch": 64.5}, "batch: expected a whole number, got 64.5"),
        ({"seed": True}, "seed: expected a whole number, got True"),
    ],
)
def test_values_of_recipes_are_checked_as_in_the_editor(
    validators: dict[str, Any], change: dict[str, Any], message: str | None
) -> None:
    assert validators["recipe"].is_valid(RECIPE | change) is (message is None)
    assert refusal(load_recipe, RECIPE | change) == (message and f"recipe: {message}")


AXIS = {"set": {"probes.pgd.threat.eps": 1}, "to": [0.1, 0.2]}
SUITE = {"probes": {"clean": "accuracy", "pgd": {**ADVERSARIAL, "attack": "pgd"}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"aggregates": {"mean": {"errors": {"clean": "1/2"}}}}, None),
        ({"axes": {"eps": AXIS}}, None),
        (
            {"aggregates": {"mean": {"errors": {"clean": True}}}},
            "aggregates.mean.errors.clean: expected a number, got True",
        ),
        (
            {"axes": {"eps": AXIS | {"set": {"probes.pgd.threat.eps": True}}}},
            "axes.eps.set.probes.pgd.threat.eps: expected a number, got True",
        ),
        ({"curves": {"pgd": [True]}}, "curves.pgd.0: expected a number, got True"),
        ({"adapt_size": "yes"}, "adapt_size: expected true or false, got 'yes'"),
    ],
)
def test_values_of_suites_are_checked_as_in_the_editor(
    validators: dict[str, Any], change: dict[str, Any], message: str | None
) -> None:
    assert validators["suite"].is_valid(SUITE | change) is (message is None)
    assert refusal(load_suite, SUITE | change) == (message and f"suite: {message}")


def refusal(load: Callable[..., Any], content: dict[str, Any]) -> str | None:
    try:
        load(content)
    except BastionError as error:
        return str(error)
    return None

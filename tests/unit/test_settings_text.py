"""The keys of recipes and suites in words."""

from __future__ import annotations

import pytest

from bastion.recipe import Recipe
from bastion.settings_text import keys_of
from bastion.suite import Suite


def test_keys_have_their_defaults_kinds_and_help() -> None:
    recipe = {(section.path, each.name): each for section in keys_of(Recipe) for each in section.settings}
    rate, data, ratio = recipe["optimizer", "lr"], recipe["", "data"], recipe["augment", "ratio"]
    assert (rate.default, rate.kind, rate.help) == ("0.001", "number > 0", "the highest")
    assert data.default == "" and data.kind.startswith("data set: a name")
    assert ratio.default == "[0.75, 1.33333]"
    assert recipe["", "normalize"].kind == "data | none or keys below"
    assert {"extra[]", "validate", "augment.patchwise"} <= {path for path, _ in recipe}


@pytest.mark.parametrize("model", [Recipe, Suite])
def test_every_key_has_help(model: type[Recipe | Suite]) -> None:
    assert [each.name for section in keys_of(model) for each in section.settings if not each.help] == []

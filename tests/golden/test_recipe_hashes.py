"""The hash of every shipped recipe, as it was: a change of what decides its weights is made on purpose.

Remake on purpose: `python -m tests.golden.test_recipe_hashes`.
"""

from __future__ import annotations

import json
from pathlib import Path

from bastion.recipe import load_recipe
from bastion.recipe_files import shipped

FILE = Path(__file__).with_name("recipe_hashes.json")


def hashes() -> dict[str, str]:
    return {name: load_recipe(name).hash() for name in shipped("recipe")}


def test_recipes_are_the_golden_ones() -> None:
    golden, found = json.loads(FILE.read_text()), hashes()
    changed = {name: (golden.get(name), found.get(name)) for name in golden.keys() | found.keys()}
    assert {name: pair for name, pair in changed.items() if pair[0] != pair[1]} == {}


if __name__ == "__main__":
    FILE.write_text(json.dumps(hashes(), indent=0) + "\n")

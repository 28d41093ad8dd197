"""Which images of the zoo's models survive AutoAttack: a weaker attack, or a search cut short, shows here first.

Remake on purpose: `python -m tests.golden.test_verdicts`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bastion

FILE = Path(__file__).parent / "verdicts.json"
MODELS = ("zoo/cifar10-linf-vit", "zoo/cifar10-linf-resnet")
IMAGES = 32


def verdicts(model: str) -> dict[str, str]:
    """For each image 1 or 0: right on the image itself, and after the attack."""
    result = bastion.evaluate(model, "cifar10-mini", "autoattack", checks=False, limit=IMAGES)
    return {name: "".join(str(int(right)) for right in result.correct(name)) for name in ("clean", "autoattack")}


@pytest.mark.slow  # a minute for each
@pytest.mark.parametrize("model", MODELS)
def test_the_same_images_survive_autoattack(model: str) -> None:
    assert verdicts(model) == json.loads(FILE.read_text())[model]


if __name__ == "__main__":
    FILE.write_text(json.dumps({model: verdicts(model) for model in MODELS}, indent=2) + "\n")

"""What the paper printed stands beside what is measured, where the two can be compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bastion.measuring.facts import Facts, read_measurements
from bastion.measuring.runner import measure
from bastion.models import Classifier
from bastion.recipe import Recipe
from bastion.run import create_run, open_run
from bastion.types import DataSet

EXPECT = {"clean": 0.7876, "pgd": 0.46, "worst": 0.29, "hours": 33, "source": "Table 1 of A. and B. 2022"}
SUITE: dict[str, Any] = {
    "paper": "A. and B. 2022",
    "axes": {"eps": {"set": "probes.pgd.threat.eps", "to": 8 / 255}},
    "probes": {
        "clean": "accuracy",
        "pgd": {"name": "adversarial", "threat": {"norm": "linf"}, "attack": {"name": "pgd", "steps": 2}},
    },
    "aggregates": {"worst": {"worst": ["clean", "pgd"]}},
}


@pytest.fixture
def ask(tiny_model: Classifier, tiny_data: DataSet, tmp_path: Path) -> Any:
    def ask(expect: dict[str, Any], data: str = "tiny", measured: DataSet = tiny_data, **options: Any) -> Facts:
        objective = {"name": "adversarial", "threat": {"norm": "linf", "eps": 8 / 255}, "attack": "fgsm"}
        recipe = Recipe.model_validate({"data": data, "model": "vit/micro", "objective": objective, "expect": expect})
        create_run(tmp_path / "run", 0, recipe)
        return measure(tiny_model, measured, **{"suite": SUITE, "folder": tmp_path / "run", "limit": 8, **options})

    return ask


def _printed(facts: Facts) -> list[str]:
    return [f"{line.split()[0]} {line.split()[-1]}" for line in facts.table().splitlines() if "  paper " in line]


def test_published_numbers_stand_in_the_last_column_and_in_the_file(ask: Any) -> None:
    facts = ask({**EXPECT, "note": "pgd: with a weak attack"})
    assert _printed(facts) == ["clean 78.8", "pgd 46.0", "worst 29.0"]
    assert facts.table().splitlines()[-1] == "paper: Table 1 of A. and B. 2022; pgd: with a weak attack"
    (stored,) = read_measurements(open_run(facts.run.folder))
    assert stored.about.published is not None
    assert stored.about.published.numbers == {"clean": 0.7876, "pgd": 0.46, "worst": 0.29}


def test_several_papers_may_have_one_protocol(ask: Any) -> None:
    assert _printed(ask(EXPECT, suite={**SUITE, "paper": ["C. 2023", "A. and B. 2022"]}))[0] == "clean 78.8"


def test_corrupted_images_are_of_the_data_that_the_run_was_trained_on(ask: Any, tiny_data: DataSet) -> None:
    corrupted = replace(tiny_data, name="tiny-c")
    assert _printed(ask(EXPECT, measured=corrupted))[0] == "clean 78.8"


def test_a_radius_that_was_not_trained_with_has_no_published_number(ask: Any) -> None:
    assert _printed(ask(EXPECT, changes="eps=4/255")) == ["clean 78.8"]


@pytest.mark.parametrize(
    ("expect", "options"),
    [
        ({}, {}),
        ({**EXPECT, "source": "Table 1 of C. 2023"}, {}),
        (EXPECT, {"data": "cifar10"}),  # the run was trained on other data
        (EXPECT, {"split": "val"}),
        (EXPECT, {"suite": {**SUITE, "paper": ""}}),
        (EXPECT, {"changes": "probes.pgd.attack.steps=1"}),  # another protocol
    ],
)
def test_nothing_is_printed_beside_what_cannot_be_compared(
    ask: Any, expect: dict[str, Any], options: dict[str, Any]
) -> None:
    facts = ask(expect, **options)
    assert facts.about.published is None and "paper " not in facts.table()

"""What the paper printed stands beside what is measured, where the two can be compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bastion.data.known import outline
from bastion.measuring.facts import Facts, read_measurements
from bastion.measuring.measurement import MeasuredCase, MeasuredThreat
from bastion.measuring.published import published
from bastion.measuring.runner import measure
from bastion.measuring.worker import build_case
from bastion.models import Classifier
from bastion.recipe import Recipe, load_recipe
from bastion.run import create_run, open_run
from bastion.suite import Case, load_suite
from bastion.types import DataSet, Probe

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


def _measured(case: Case) -> MeasuredCase:
    built = build_case(case)
    threat = built.describe().threat if isinstance(built, Probe) else None
    return MeasuredCase(
        label=case.label,
        kind=case.kind,
        role="attack",
        store="",
        n=1,
        spec={},
        at=case.at,
        threat=MeasuredThreat(norm=threat.norm, eps=threat.eps) if threat else None,
        columns=(),
    )


def _shown(recipe: str, suite: str, data: str, changes: str = "", known_as: str = "") -> dict[str, float]:
    """The paper's numbers beside a run of this recipe that is measured on a data set of the size of `known_as`."""
    changed, images = load_suite(suite, changes or ()), replace(outline({"name": known_as or data}), name=data)
    cases = [_measured(case) for case in changed.cases()]
    found = published(load_recipe(recipe).resolved(), changed, load_suite(suite), cases, images, "test")
    return found.numbers if found else {}


def test_the_radii_of_tang_et_al_are_of_one_data_set_each() -> None:
    assert _shown("generalization/vit", "tang2022", "cifar10")["worst-case"] == 0.2924
    assert not _shown("generalization/vit", "tang2022-imagenette", "cifar10")
    assert not _shown("generalization/imagenette-vit", "tang2022", "imagenette")
    assert _shown("generalization/imagenette-vit", "tang2022-imagenette", "imagenette") == {"clean": 0.7401}
    assert _shown("generalization/vit", "tang2022", "cifar10", "eps2=0.5").keys() == {
        *("clean", "pgd-20-linf", "autoattack", "pgd-20-l1")
    }


def test_a_model_trained_without_an_attack_has_the_papers_radii() -> None:
    assert _shown("cauchy/vit-s1", "wang2022", "cifar10").keys() >= {"fgsm", "pgd-7-linf"}
    for change in ("eps2=0.05", "eps2=2"):
        assert "pgd-7-l2" not in _shown("cauchy/vit-s1", "wang2022", "cifar10", change)  # 2 is of 224 pixels
    assert "pgd-7-l2" in _shown("cauchy/vit-s1", "wang2022", "cifar10", known_as="imagenette")


def test_a_model_trained_at_another_radius_than_the_suites_is_measured_at_that() -> None:
    recipe = "convstem/vit-s-convstem-eps8"
    assert _shown(recipe, "singh2023", "imagenet") == {"clean": 0.675}
    assert _shown(recipe, "singh2023", "imagenet", "eps=8/255") == {"clean": 0.675, "autoattack": 0.282}
    assert _shown(recipe, "singh2023", "imagenet", "eps=2/255") == {"clean": 0.675}


@pytest.mark.parametrize(
    ("recipe", "suite", "plain", "files", "label"),
    [
        ("generalization/vit", "cifar10-c", "cifar10", "cifar10-c", "mean corruption accuracy"),
        ("rspc/rvt-s", "imagenet-c", "imagenet", "imagenet-c", "mCE"),
    ],
)
def test_numbers_of_the_published_corruptions_are_not_beside_others(
    recipe: str, suite: str, plain: str, files: str, label: str
) -> None:
    assert not _shown(recipe, suite, plain)
    assert _shown(recipe, suite, files, known_as=plain).keys() >= {"clean", label}


def test_photos_of_imagenet_by_another_name_are_imagenets() -> None:
    numbers = _shown("xcit/s12", "debenedetti2022", "imagenet")
    assert numbers and numbers == _shown("xcit/s12", "debenedetti2022", "imagenet-val", known_as="imagenet")
    assert not _shown("xcit/s12", "debenedetti2022", "imagenet-val", known_as="imagenet-100")  # fewer classes


def test_accuracy_on_a_natural_shift_has_a_number_of_its_own() -> None:
    of_paper = load_recipe("rspc/rvt-s").resolved()["expect"]
    assert _shown("rspc/rvt-s", "natural", "imagenet-a", known_as="imagenet-100") == {"clean": of_paper["imagenet-a"]}
    assert not _shown("xcit/s12", "debenedetti2022", "imagenet-a", known_as="imagenet-100")
    assert not _shown("rspc/rvt-s", "natural", "imagenet-r", known_as="imagenet-100")

"""Every shipped recipe and suite is right, down to the parameters of each plug-in it names."""

from __future__ import annotations

import csv
import fnmatch
import runpy
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from bastion import BastionError
from bastion.costs import training_passes
from bastion.data import datasets
from bastion.data.augment import TrainingTransform
from bastion.data.known import SIZES, outline
from bastion.measuring.worker import build_case
from bastion.models import complexity, models
from bastion.models.load import zoo_names
from bastion.models.meta import meta
from bastion.papers import read_paper
from bastion.recipe import load_recipe as _load_recipe
from bastion.recipe_files import PAPERS, SHIPPED, headlines, shipped
from bastion.recipe_yaml import read
from bastion.suite import load_suite
from bastion.training.build import build_model, build_objective
from bastion.types import DataSet

ROOT = Path(__file__).parents[2]
TABLES = runpy.run_path(str(ROOT / "scripts" / "recipes_table.py"))
NAMES = shipped("recipe")
MEASURED = ("tiny/", "zoo/")  # here; all others are of papers
TIMES = {"minutes", "hours"}

# Rows that the papers have twice: their differences are what a repetition makes.
TWINS = {
    ("xcit/warmup-20", "xcit/aug-mix-cut-rand-erase"),
    ("xcit/aug-none", "xcit/wd-5e-2"),
    ("xcit/aug-mix-standard", "xcit/wd-5e-2-standard"),
}

# With the 10 classes of CIFAR-10, or the 1,000 of ImageNet.
PARAMETERS = {
    "xcit/arch-deit-s": 22_050_664,
    "xcit/arch-cait-s12": 25_611_688,
    "xcit/warmup-0": 3_053_224,
    "xcit/s12": 26_253_304,
    "xcit/m12": 46_401_160,
    "xcit/l12": 103_792_648,
    "xcit/resnet50-gelu": 25_557_032,
    "generalization/pvtv2": 12_406_474,
    "convstem/vit-m-heavy-50": 38_849_512,
    "convstem/vit-b-heavy-50": 86_567_656,
    "convstem/convnext-t-scratch-50": 28_589_128,
    "convstem/convnext-b-heavy-50": 88_591_464,
    "convstem/iso-s-scratch-50": 22_308_712,
    "rspc/rvt-b": 91_755_688,
}

load_recipe = cache(_load_recipe)


@cache
def _data(name: str) -> DataSet:
    """Without its files, unless it ships with bastion."""
    return outline({"name": name}) if name in SIZES else datasets.build(name)


def test_recipes_name_only_what_exists() -> None:
    wrong = {}
    for name in NAMES:
        try:
            build_objective(load_recipe(name))
        except BastionError as error:
            wrong[name] = str(error)
    assert wrong == {}


def test_the_list_says_what_the_recipes_say() -> None:
    """It is made of the papers' words, without a look at the recipes themselves."""
    assert dict(headlines("recipe")) == {name: load_recipe(name).about.partition("\n")[0] for name in NAMES}


def test_patterns_of_papers_match_and_published_numbers_are_of_rows() -> None:
    for path in PAPERS.glob("*.yaml"):
        paper, text = read_paper(path), read(path.read_text(), str(path))
        with path.with_suffix(".csv").open(newline="") as file:
            published = [row["name"] for row in csv.DictReader(file)]
        assert len(published) == len({*published}) and {*published} <= paper.rows.keys(), path
        patterns = [each for table in text["tables"].values() for key in table.get("rows", {}) for each in key.split()]
        assert [pattern for pattern in patterns if not fnmatch.filter(paper.rows, pattern)] == [], path
        unused = [
            word
            for axis, words in text["axes"].items()
            for word in map(str, words)
            if all(row.words.get(axis) != word for row in paper.rows.values())
        ]
        assert unused == [], path


def test_blocks_fit_into_a_recipe(tmp_path: Path) -> None:
    blocks = sorted(path.relative_to(SHIPPED).with_suffix("").as_posix() for path in SHIPPED.glob("base/**/*.yaml"))
    assert len(blocks) == 9
    for name in blocks:
        (tmp_path / "with.yaml").write_text(
            f"extends: [tiny/demo-robust, {name}]\nvalidate: {{threat: {{norm: linf, eps: 8/255}}}}"
        )
        build_objective(_load_recipe(tmp_path / "with.yaml"))
        assert (SHIPPED / f"{name}.yaml").read_text().startswith("about: ")


def test_recipes_say_their_command_and_what_to_expect() -> None:
    for name in NAMES:
        recipe = load_recipe(name)
        assert recipe.about.endswith(f"bastion train {name}\n"), name
        accuracies = {
            key: value for key, value in recipe.expect.items() if isinstance(value, float) and key not in TIMES
        }
        assert all(0 <= value <= 1 for value in accuracies.values()), name
        if name.startswith(MEASURED):
            assert {"clean", "minutes"} <= recipe.expect.keys(), name
        elif not accuracies:
            words = f"{recipe.expect['source']} {recipe.expect.get('note', '')}".replace(":", "").split()
            assert {"none", "without", "only"} & {*words}, name


def test_tiny_recipes_take_ten_minutes_at_most() -> None:
    minutes = {name: load_recipe(name).expect["minutes"] for name in NAMES if name.startswith("tiny/")}
    assert {name for name, taken in minutes.items() if taken > 10} == set()


def test_robust_training_shows_its_over_fitting() -> None:
    """But for the zoo, whose models are trained, and what has no attack."""
    for name in NAMES:
        recipe = load_recipe(name)
        if recipe.validate_.attack and not name.startswith("zoo/"):
            assert recipe.validate_.train == recipe.validate_.limit, name


def test_images_with_copies_in_training_choose_no_epoch() -> None:
    names = [name for name in NAMES if name.startswith("rspc/") and load_recipe(name).extra]
    assert len(names) == 31
    assert {load_recipe(name).validate_.choose for name in names} == {"last"}


def test_the_cool_down_is_run_where_the_papers_code_runs_it() -> None:
    for model, expected in {"rvt-ti": (300, 0), "rvt-b": (300, 0), "fan-b": (310, 10)}.items():
        for name in (f"rspc/{model}", f"rspc/{model}-rspc"):
            schedule = load_recipe(name).schedule
            assert (schedule.epochs, schedule.cooldown_epochs) == expected, name


def test_the_cost_is_what_objectives_really_do() -> None:
    """A pass of the tables is a forward and a backward one."""
    recipes = map(load_recipe, NAMES)
    for recipe in {(str(each.objective), each.optimizer.perturb): each for each in recipes}.values():
        assert TABLES["passes"](recipe) == round(recipe.schedule.epochs * training_passes(recipe).backward)


def test_only_the_papers_repetitions_are_the_same_run() -> None:
    runs = defaultdict(list)
    for name in NAMES:
        runs[load_recipe(name).hash()].append(name)
    assert {tuple(names) for names in runs.values() if len(names) > 1} == TWINS


def test_recipes_begin_with_the_zoo_with_runs_of_recipes_or_with_imported_weights() -> None:
    for name in NAMES:
        if init := load_recipe(name).init:
            kind, _, rest = init.from_.partition("/")
            assert {"zoo": init.from_ in zoo_names(), "runs": rest in NAMES, "weights": bool(rest)}[kind]
            assert kind == "zoo" or init.from_ in load_recipe(name).about, (
                f"{name} does not say how to get {init.from_}"
            )


def test_images_can_be_augmented_and_batched_as_the_recipes_say() -> None:
    settings = {(each.augment, each.data.name) for each in map(load_recipe, NAMES)}
    for augment, data in settings:
        TrainingTransform(augment, _data(data))
    for recipe in map(load_recipe, NAMES):
        assert recipe.batch % 2 == 0 or not (recipe.augment.mixup or recipe.augment.cutmix)


@pytest.mark.slow  # over a hundred models
def test_models_take_the_images_of_the_data() -> None:
    """On torch's meta device: shapes are computed, numbers are not."""
    recipes = map(load_recipe, NAMES)
    for recipe in {(str(each.model), each.data.name, each.resize): each for each in recipes}.values():
        data = _data(recipe.data.name)
        with meta():
            build_model(recipe, data)


def test_models_have_the_size_of_the_paper() -> None:
    found = {}
    for name in PARAMETERS:
        recipe = load_recipe(name)
        classes = 10 if recipe.data.name == "cifar10" else 1000
        with meta():
            found[name] = complexity.parameters(models.build(recipe.model.plain(), num_classes=classes).network)
    assert found == PARAMETERS


def test_the_page_has_the_tables_of_the_recipes() -> None:
    page = TABLES["PAGE"].read_text()
    assert page == TABLES["rendered"](page), "write them again: python scripts/recipes_table.py"
    folders = {name.partition("/")[0] for name in NAMES}
    assert folders == {folder for _, folder, _ in TABLES["MARKED"].findall(page)}


def test_suites_name_only_what_exists() -> None:
    for name in shipped("suite"):
        suite = load_suite(name)
        assert suite.about, name
        assert len([build_case(case) for case in suite.cases()]) >= len(suite.probes), name

"""What is kept of the understanding study, and what is left to do where some of it is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from scripts.understanding_claims import MODELS
from scripts.understanding_study import SMALL, Sizes, all_jobs, jobs, keep

from bastion.measuring.facts import read_measurements
from bastion.measuring.runner import measure
from bastion.models import Classifier
from bastion.reporting.html import report
from bastion.run import open_run
from bastion.types import DataSet


@pytest.fixture
def sizes(tmp_path: Path) -> Sizes:
    return dataclasses.replace(SMALL, home=tmp_path / "runs", results=tmp_path / "results")


def test_what_is_kept_reads_as_the_run_does_without_its_weights(
    tiny_model: Classifier, tiny_data: DataSet, tmp_path: Path, sizes: Sizes
) -> None:
    suite = {"probes": {"clean": "accuracy"}, "studies": {"sparsity": "sparsity"}}
    facts = measure(tiny_model, tiny_data, suite, folder=sizes.home / "robust-vit")
    (sizes.home / "robust-vit" / "model").mkdir()
    (sizes.home / "robust-vit" / "model" / "weights").write_bytes(b"large")
    keep("robust-vit", sizes)
    (kept,) = read_measurements(open_run(sizes.results / "robust-vit"))
    assert kept.accuracies() == facts.accuracies() and kept.scalars() == facts.scalars()
    assert not (sizes.results / "robust-vit" / "model").exists()
    page = report(sizes.results / "robust-vit", tmp_path / "page.html").read_text()
    assert "Sparsity of the weights" in page and "robust-vit" in page


def left(sizes: Sizes, *kept: str) -> list[list[tuple[str, str]]]:
    for name in kept:
        (sizes.results / name).mkdir(parents=True, exist_ok=True)
    return jobs(sizes)


def test_all_is_to_do_where_nothing_is_kept_and_nothing_where_all_is(sizes: Sizes) -> None:
    assert jobs(sizes) == all_jobs(sizes)
    untrained = [f"untrained-{name}" for name in sizes.networks]
    assert left(sizes, *MODELS, *sizes.networks, *untrained) == [[], []]


def test_a_model_is_looked_at_by_others_which_are_trained_again(sizes: Sizes) -> None:
    untrained = [f"untrained-{name}" for name in sizes.networks]
    judges = [("twin", "standard-resnet"), ("twin", "standard-vit"), ("network", "covit-t2")]
    assert left(sizes, *MODELS[1:], *sizes.networks, *untrained) == [judges, [("model", MODELS[0])]]


def test_an_untrained_network_takes_the_recipe_of_its_training(sizes: Sizes) -> None:
    untrained = [f"untrained-{name}" for name in sizes.networks[1:]]
    name = sizes.networks[0]
    wanted = [[("network", name)], [("untrained", f"untrained-{name}")]]
    assert left(sizes, *MODELS, *sizes.networks, *untrained) == wanted

"""Norms of matrices that are known, and the bound's term put together by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.vits import small_vit
from torch import nn

from bastion.data.arrays import ArraySplit
from bastion.errors import BastionError
from bastion.measuring.runner import measure
from bastion.models import Classifier
from bastion.models.weight_kinds import weights
from bastion.studies.weight_norms import WeightNorms
from bastion.suite import load_suite
from bastion.types import DataSet


def test_norms_of_a_known_matrix(tiny_data: DataSet) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    matrix = torch.zeros(3, 192)
    matrix[0, 0], matrix[1, 1], matrix[1, 2], matrix[2, 5] = 7.0, 3.0, -4.0, 2.0
    with torch.no_grad():
        network[1].weight.copy_(matrix)
    facts = WeightNorms(images=48)(network, tiny_data, 0, seed=0)
    assert facts["l1"].tolist() == [16] and facts["row_l1"].tolist() == [7]
    assert facts["spectral"].item() == pytest.approx(7)  # rows are orthogonal, of lengths 7, 5 and 2
    assert facts["norm_21"].item() == pytest.approx(14)
    assert facts["term"].isnan().all() and facts["largest_term"].isnan()


def test_a_filter_is_a_row(tiny_model: Classifier, tiny_data: DataSet) -> None:
    facts = WeightNorms(images=48)(tiny_model, tiny_data, 0, seed=0)
    filters = tiny_model.network[0].weight  # type: ignore[index, union-attr]
    assert facts["norm_21"][0].item() == pytest.approx(filters.flatten(1).norm(dim=1).sum().item())
    assert facts["spectral"][0].item() == pytest.approx(torch.linalg.svdvals(filters.flatten(1))[0].item(), rel=1e-5)


def test_the_term_is_that_of_the_theorem(tiny_data: DataSet) -> None:
    model = small_vit(depth=2).float()
    pixels = torch.randint(0, 256, (60, 16, 16, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    split = ArraySplit(pixels.numpy(), torch.arange(60).remainder(3).numpy())
    data = DataSet(**{**vars(tiny_data), "shape": (3, 16, 16), "train": split})
    facts = WeightNorms(images=60, eps=0.25)(model, data, 0, seed=0)
    batch = split.batch(range(60))
    logits = model(batch.x).double()
    right = logits.gather(1, batch.y[:, None])[:, 0]
    lead = right - logits.scatter(1, batch.y[:, None], -torch.inf).amax(1)
    gamma = lead[lead > 0].median().item()
    by_name = {weight.name: weight.tensor for weight in weights(model)}
    for number in range(2):
        b1 = by_name[f"network.blocks.{number}.attn.qkv"].abs().sum(1).max().item()
        b2 = max(by_name[f"network.blocks.{number}.mlp.fc{each}"].abs().sum(1).max().item() for each in (1, 2))
        expected = 2 * 0.25 * b1 * b2 / (gamma * math.sqrt(60))
        assert facts["term"][number].item() == pytest.approx(expected, rel=1e-4)
    assert facts["largest_term"] == facts["term"].max()
    assert facts["gamma"].item() == pytest.approx(gamma, rel=1e-4) and facts["n"] == 60


def test_more_images_than_there_are_is_one_line(tiny_model: Classifier, tiny_data: DataSet) -> None:
    with pytest.raises(BastionError, match=r"weight-norms\.images: the train split of tiny has 48 images, got 1000"):
        WeightNorms()(tiny_model, tiny_data, 0, seed=0)


def test_the_split_is_that_of_margin_and_number(tiny_model: Classifier, tiny_data: DataSet) -> None:
    swapped = DataSet(**{**vars(tiny_data), "train": tiny_data.test, "test": tiny_data.train})
    n = len(tiny_data.test)
    facts = WeightNorms(images=n, split="test")(tiny_model, tiny_data, 0, seed=0)
    others = WeightNorms(images=n)(tiny_model, swapped, 0, seed=0)
    assert facts["n"] == n and torch.equal(facts["gamma"], others["gamma"])


def test_the_eps_of_the_suites_is_that_of_the_term() -> None:
    """And Lemma 1 keeps its own."""
    for name in ("weights", "analysis"):
        cases = load_suite(name, "eps=4/255").cases()
        assert [case.spec["eps"] for case in cases if case.base == "norms"] == [4 / 255]
        assert [case.spec["eps"] for case in cases if case.base == "lemma-1"] == [8 / 255, 1]


def test_data_without_training_images_is_told_before_the_first_study_with_what_would_do(
    tiny_model: Classifier, tmp_path: Path
) -> None:
    x, y = torch.rand(12, 3, 8, 8), torch.arange(12) % 3
    line = {"name": "landscape", "dimensions": 1, "points": 3, "n": 8}
    suite = {
        "axes": {"eps": {"set": "studies.lemma.eps", "to": [0.1, 0.2]}},
        "studies": {"norms": "weight-norms", "lemma": {"name": "rademacher", "draws": 5}, "line": line},
    }
    told = r"studies\.norms takes 1000 images of the train split, which has 0; studies\.lemma takes 500 .* change the "
    with pytest.raises(BastionError, match=told) as caught:
        measure(tiny_model, (x, y), suite, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    changes = str(caught.value).partition("change the suite: --set ")[2].split(" --set ")
    wanted = [f"studies.{name}={value}" for name, value in (("norms.split", "test"), ("norms.images", 12))]
    wanted += [f"studies.{name}={value}" for name, value in (("lemma.split", "test"), ("lemma.images", 12))]
    assert changes == [*wanted, "studies.line.split=test"]
    facts = measure(tiny_model, (x, y), suite, changes=changes, folder=tmp_path / "run")
    assert facts.studies()["norms"]["n"] == 12

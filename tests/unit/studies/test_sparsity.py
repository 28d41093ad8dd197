"""Sparsity of networks whose small weights were planted."""

from __future__ import annotations

import math

import pytest
import torch
from tests.vits import small_vit
from torch import nn

from bastion.models.weight_kinds import KINDS
from bastion.studies.sparsity import BINS, Sparsity
from bastion.types import DataSet

ALL, ROWS = 0, {kind: row for row, kind in enumerate(KINDS, 1)}


def planted() -> nn.Module:
    """A convolution of 48 weights, 12 of them tiny, and a linear layer of 20, 15 of them tiny by its own largest."""
    network = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 5))
    with torch.no_grad():
        filters = torch.full((48,), 0.5)
        filters[:12] = 0.0099 * 2
        filters[-1] = -2.0  # the largest of the model
        network[0].weight.copy_(filters.view(4, 3, 2, 2))
        rows = torch.full((20,), 1e-4)
        rows[:5] = 0.019
        network[3].weight.copy_(rows.view(5, 4))
        network[0].bias.fill_(1e-9)
        network[1].weight.fill_(1e3)  # norms and biases do not count
    return network


def test_the_planted_share_is_found(tiny_data: DataSet) -> None:
    facts = Sparsity()(planted(), tiny_data, 0, seed=0)
    assert facts["largest"] == 2
    assert facts["count"][[ALL, ROWS["convolution"], ROWS["other"]]].tolist() == [68, 48, 20]
    assert facts["share"][ROWS["convolution"]] == 12 / 48
    assert facts["share"][ROWS["other"]] == 1  # all 20 are below 0.01 · 2
    assert facts["share_by_tensor"][ROWS["other"]] == 15 / 20
    assert facts["sparsity"] == facts["share"][ALL] == 32 / 68


def test_the_middle_of_the_histogram_is_the_sparse_share(tiny_data: DataSet) -> None:
    facts = Sparsity()(small_vit(), tiny_data, 0, seed=0)
    assert facts["histogram"].shape == (1 + len(KINDS), BINS)
    assert torch.equal(facts["histogram"].sum(1), facts["count"])
    assert torch.equal(facts["histogram"][1:].sum(0), facts["histogram"][0])
    middle = facts["histogram"][:, BINS // 2 - 1 : BINS // 2 + 1].sum(1) / facts["count"]
    assert torch.allclose(middle.double(), facts["share"], atol=1e-4)


def test_what_a_model_lacks_is_nan(tiny_data: DataSet) -> None:
    facts = Sparsity()(planted(), tiny_data, 0, seed=0)
    row = ROWS["qkv"]
    assert facts["count"][row] == 0 and not facts["histogram"][row].any()
    assert all(math.isnan(facts[name][row].item()) for name in ("share", "share_by_tensor", "kurtosis"))


def test_kurtosis_of_known_distributions(tiny_data: DataSet) -> None:
    linear = nn.Linear(1000, 400, bias=False)
    for draw, expected in ((nn.init.normal_, 3.0), (nn.init.uniform_, 9 / 5)):
        with torch.no_grad():
            draw(linear.weight)
            linear.weight -= linear.weight.mean()
        kurtosis = Sparsity()(linear, tiny_data, 0, seed=0)["kurtosis"][ALL].item()
        assert kurtosis == pytest.approx(expected, abs=0.05)


def test_zeros_are_sparse_whatever_the_margin(tiny_data: DataSet) -> None:
    linear = nn.Linear(4, 4)
    nn.init.zeros_(linear.weight)
    assert Sparsity(margin=1e-9)(linear, tiny_data, 0, seed=0)["sparsity"] == 1

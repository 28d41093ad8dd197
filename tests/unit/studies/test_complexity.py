"""Parameters and multiply-accumulates, against what can be counted by hand."""

from __future__ import annotations

from torch import nn

from bastion.models import Classifier
from bastion.studies.complexity import Complexity
from bastion.types import DataSet


def test_a_small_network_costs_what_one_counts_by_hand(tiny_model: Classifier, tiny_data: DataSet) -> None:
    facts = Complexity()(tiny_model, tiny_data, 0, seed=0)
    # A 3×3 convolution of 3 to 8 channels on 8×8 pixels, BatchNorm, and a linear layer of 8 to 3.
    assert facts["parameters"].item() == (3 * 9 * 8 + 8) + 2 * 8 + (8 * 3 + 3)
    assert facts["macs"].item() == 8 * 8 * 8 * 3 * 9 + 8 * 3


def test_it_takes_any_network(tiny_data: DataSet) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 3, bias=False))
    assert {name: value.item() for name, value in Complexity()(network, tiny_data, 0, seed=0).items()} == {
        "parameters": 576,
        "macs": 576,
    }

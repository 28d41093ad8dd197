"""What weights are for, in networks whose layers are known by name."""

from __future__ import annotations

import pytest
import torch
from tests.vits import small_vit
from torch import nn

from bastion.errors import BastionError
from bastion.models import Classifier
from bastion.models.weight_kinds import weights


def test_a_vit_has_one_weight_of_each_kind_in_each_block() -> None:
    found = [(weight.name, weight.kind, weight.block) for weight in weights(small_vit(depth=1))]
    assert found == [
        ("network.patch_embed.proj", "convolution", -1),
        ("network.blocks.0.attn.qkv", "qkv", 0),
        ("network.blocks.0.attn.proj", "projection", 0),
        ("network.blocks.0.mlp.fc1", "feed-forward", 0),
        ("network.blocks.0.mlp.fc2", "feed-forward", 0),
        ("network.head", "other", -1),
    ]


def test_a_network_of_torchs_own_transformer_layers() -> None:
    layer = nn.MultiheadAttention(8, 2)
    assert [(weight.name, weight.kind) for weight in weights(layer)] == [
        (".in_proj_weight", "qkv"),
        ("out_proj", "projection"),
    ]


def test_biases_and_norms_are_no_weights_and_shared_weights_count_once(tiny_model: Classifier) -> None:
    assert [weight.name for weight in weights(tiny_model)] == ["network.0", "network.5"]
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    assert len(weights(nn.Sequential(first, second))) == 1


def test_the_weights_of_parametrised_layers_are_those_that_act() -> None:
    layers = [torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)) for _ in range(3)]
    with torch.no_grad():
        layers[0].parametrizations.weight.original0.zero_()  # type: ignore[union-attr, operator]
    found = weights(nn.Sequential(*layers))
    assert [bool(weight.tensor.any()) for weight in found] == [False, True, True]


def test_models_that_cannot_be_looked_at_say_why(tiny_model: Classifier) -> None:
    with pytest.raises(BastionError, match="ReLU has no linear or convolutional layer"):
        weights(nn.ReLU())
    with torch.no_grad():
        tiny_model.network[5].weight[0, 0] = torch.nan  # type: ignore[index, union-attr, operator]
    with pytest.raises(BastionError, match=r"network\.5 has NaN or infinite values"):
        weights(tiny_model)

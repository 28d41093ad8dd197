"""PVTv2 for small images."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from bastion import BastionError
from bastion.models import complexity, models
from bastion.models.classifier import Classifier
from bastion.models.meta import meta

cifar_pvtv2 = models.factory("cifar/pvtv2")
tiny_pvtv2 = models.factory("tiny/pvtv2")


@pytest.mark.parametrize("stride", [1, 2, 4])
def test_parameters_are_those_of_the_paper_at_every_stride(stride: Literal[1, 2, 4]) -> None:
    with meta():
        assert complexity.parameters(cifar_pvtv2(patch_size=stride).network) == 12_406_474


def test_the_tiny_one_is_tiny() -> None:
    with meta():
        assert complexity.parameters(tiny_pvtv2().network) <= 1_500_000


@pytest.mark.parametrize(("size", "stride"), [(32, 4), (32, 1), (224, 4)])
def test_every_token_of_the_grid_asks_49_pooled_ones(size: int, stride: Literal[1, 2, 4]) -> None:
    with meta():
        model = Classifier(cifar_pvtv2(img_size=size, patch_size=stride), (0.5,) * 3, (0.5,) * 3).eval()
        with model.tap("attention") as taps:
            assert model(torch.empty(1, 3, size, size)).shape == (1, 10)
    sides = [size // stride // 2**stage for stage in range(4) for _ in range(2)]
    heads = [1, 1, 2, 2, 5, 5, 8, 8]
    expected = [(1, head, side**2, 49) for head, side in zip(heads, sides, strict=True)]
    assert [tuple(each.shape) for each in taps.attention.values()] == expected


def test_other_strides_are_refused() -> None:
    with pytest.raises(BastionError, match="model.patch_size: unknown patch_size 8; known: 1, 2, 4"):
        models.build({"name": "cifar/pvtv2", "patch_size": 8})

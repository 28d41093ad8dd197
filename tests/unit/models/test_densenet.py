"""DenseNet for small images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bastion import BastionError
from bastion.models import complexity, models
from bastion.models.classifier import Classifier
from bastion.models.meta import meta

cifar_densenet = models.factory("cifar/densenet")


def test_it_has_one_million_parameters() -> None:
    with meta():
        assert complexity.parameters(cifar_densenet().network) == 1_000_618


def test_dense_blocks_keep_their_input_beside_what_they_add() -> None:
    model = Classifier(cifar_densenet(img_size=8), (0.5,) * 3, (0.5,) * 3).eval()
    inputs: list[Tensor] = []

    def keep(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        inputs.append(given[0])

    for block in model.blocks():
        block.module.register_forward_pre_hook(keep)
    with torch.no_grad(), model.tap("blocks") as taps:
        model(torch.rand(1, 3, 8, 8))
    layers, sides = (6, 12, 24, 16), (8, 4, 2, 1)
    assert len(taps.blocks) == 4
    for before, after, depth, side in zip(inputs, taps.blocks.values(), layers, sides, strict=True):
        assert torch.equal(after[:, : before.shape[1]], before)
        assert after.shape == (1, before.shape[1] + 12 * depth, side, side)


def test_images_that_three_poolings_would_lose_are_refused() -> None:
    with pytest.raises(BastionError, match="needs 8 pixels or more, got 4"):
        models.build({"name": "cifar/densenet", "img_size": 4})

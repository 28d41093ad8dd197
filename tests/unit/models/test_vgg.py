"""VGG for small images."""

from __future__ import annotations

import pytest
import torch

from bastion import BastionError
from bastion.models import complexity, models
from bastion.models.classifier import Classifier
from bastion.models.meta import meta

cifar_vgg = models.factory("cifar/vgg")


def test_parameters_are_those_of_the_paper() -> None:
    with meta():
        assert complexity.parameters(cifar_vgg().network) == 14_728_266


@pytest.mark.parametrize("size", [32, 224])
def test_its_five_blocks_are_the_stages_between_poolings(size: int) -> None:
    with meta():
        model = Classifier(cifar_vgg(img_size=size), (0.5,) * 3, (0.5,) * 3).eval()
        with model.tap("blocks") as taps:
            assert model(torch.empty(1, 3, size, size)).shape == (1, 10)
    widths = (64, 128, 256, 512, 512)
    expected = [(1, width, size >> stage, size >> stage) for stage, width in enumerate(widths)]
    assert [tuple(each.shape) for each in taps.blocks.values()] == expected


def test_images_that_five_poolings_would_lose_are_refused() -> None:
    with pytest.raises(BastionError, match="needs 32 pixels or more, got 16"):
        models.build({"name": "cifar/vgg", "img_size": 16})

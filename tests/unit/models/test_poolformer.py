"""PoolFormer for small images."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from bastion import BastionError
from bastion.models import complexity, models
from bastion.models.classifier import Classifier
from bastion.models.meta import meta

cifar_poolformer = models.factory("cifar/poolformer")
tiny_poolformer = models.factory("tiny/poolformer")


def test_parameters_are_those_of_the_paper_at_every_stride() -> None:
    with meta():
        assert complexity.parameters(cifar_poolformer().network) == 11_399_626
        assert complexity.parameters(cifar_poolformer(patch_size=4).network) == 11_399_626
        assert complexity.parameters(tiny_poolformer().network) <= 1_500_000


@pytest.mark.parametrize("stride", [1, 2, 4])
def test_the_stem_has_the_stride_that_was_asked_for(stride: Literal[1, 2, 4]) -> None:
    with meta():
        model = Classifier(cifar_poolformer(img_size=224, patch_size=stride), (0.5,) * 3, (0.5,) * 3).eval()
        with model.tap("blocks") as taps:
            assert model(torch.empty(1, 3, 224, 224)).shape == (1, 10)
    sides = [each.shape[-1] for each in taps.blocks.values()]
    first = 224 // stride
    assert sides == [first] * 2 + [first // 2] * 2 + [first // 4] * 6 + [first // 8] * 2


def test_tokens_are_mixed_by_the_mean_of_their_neighbours() -> None:
    mixer = tiny_poolformer().network.stages[0].blocks[0].token_mixer
    x = torch.randn(1, 2, 5, 5)
    assert torch.allclose(mixer(x)[..., 2, 2], x[..., 1:4, 1:4].mean((2, 3)) - x[..., 2, 2], atol=1e-6)
    assert torch.allclose(mixer(x)[..., 0, 0], x[..., :2, :2].mean((2, 3)) - x[..., 0, 0], atol=1e-6)


def test_other_strides_are_refused() -> None:
    with pytest.raises(BastionError, match="model.patch_size: unknown patch_size 3; known: 1, 2, 4"):
        models.build({"name": "cifar/poolformer", "patch_size": 3})

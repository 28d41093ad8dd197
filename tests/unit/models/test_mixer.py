"""MLP-Mixer with a class token."""

from __future__ import annotations

import pytest
import torch

from bastion.models import complexity, models
from bastion.models.meta import meta

cifar_mixer = models.factory("cifar/mixer")
tiny_mixer = models.factory("tiny/mixer")


def test_it_has_the_parameters_of_the_paper() -> None:
    with meta():
        assert complexity.parameters(cifar_mixer().network) == 681_746
        assert complexity.parameters(tiny_mixer().network) <= 1_500_000


def test_patches_of_16_serve_images_of_224() -> None:
    with meta():
        network = cifar_mixer(img_size=224, patch_size=16).network.eval()
        assert network.blocks[0].mlp_tokens.fc1.in_features == 197
        assert network(torch.empty(2, 3, 224, 224)).shape == (2, 10)


def test_the_head_sees_the_class_token_only_and_it_the_patches() -> None:
    network = tiny_mixer().network.eval()
    x = torch.rand(1, 3, 32, 32)
    tokens = []
    network.blocks[-1].register_forward_hook(lambda _, inputs, output: tokens.append(output))
    logits = network(x)
    torch.testing.assert_close(logits, network.head(network.norm(tokens[0][:, 0])))
    x[..., -4:, -4:] = 0.0
    assert not torch.allclose(network(x), logits)


def test_images_that_patches_do_not_fill_are_refused() -> None:
    with pytest.raises(ValueError, match="img_size: 30 cannot be cut into patches of 4"):
        cifar_mixer(img_size=30)

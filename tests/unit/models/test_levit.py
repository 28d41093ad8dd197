"""LeViT for small images."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bastion import BastionError
from bastion.models import complexity, models
from bastion.models.classifier import Classifier
from bastion.models.meta import meta

cifar_levit = models.factory("cifar/levit")
tiny_levit = models.factory("tiny/levit")

PLAIN = 7_004_826  # of LeViT-128S without its tables of biases, which have heads × tokens entries


def _biases(first: int) -> int:
    """Of blocks and of the two shrinking attentions, from grids of first², (first/2)², (first/4)²."""
    a, b, c = (-(-first // 2**stage) for stage in range(3))
    return 2 * 4 * a**2 + 8 * a**2 + 3 * 6 * b**2 + 16 * b**2 + 4 * 8 * c**2


def test_parameters_are_those_of_levit_128s_and_its_tables() -> None:
    with meta():
        assert complexity.parameters(cifar_levit(patch_size=16).network) == PLAIN + _biases(2) == 7_004_956
        assert complexity.parameters(cifar_levit().network) == PLAIN + _biases(8) == 7_006_522
        assert complexity.parameters(tiny_levit().network) <= 1_500_000


@pytest.mark.parametrize(("size", "patch", "sides"), [(32, 4, (8, 4, 2)), (32, 2, (16, 8, 4)), (224, 16, (14, 7, 4))])
def test_patches_make_the_grid(size: int, patch: int, sides: tuple[int, ...]) -> None:
    with meta():
        backbone = models.factory("cifar/levit")(img_size=size, patch_size=patch)
        model = Classifier(backbone, (0.5,) * 3, (0.5,) * 3).eval()
        with model.tap("attention") as taps:
            assert model(torch.empty(1, 3, size, size)).shape == (1, 10)
    found = [each.shape[-1] for each in taps.attention.values()]
    assert found == [side**2 for side, depth in zip(sides, (2, 3, 4), strict=True) for _ in range(depth)]


def test_nothing_of_a_forward_pass_in_eval_mode_stays_behind() -> None:
    """timm's cache of biases would answer with those of before, and could not be copied."""
    network = tiny_levit().network.eval()
    x = torch.rand(1, 3, 32, 32)
    before = network(x)
    other = copy.deepcopy(network)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("attention_biases"):
                nn.init.normal_(parameter, std=3)
    assert not torch.equal(network(x), before)
    assert torch.equal(other(x), before)
    for _ in range(2):  # a graph of the first pass would be freed by the second
        network(x).sum().backward()


def test_images_that_patches_do_not_divide_are_refused() -> None:
    with pytest.raises(BastionError, match="30 cannot be cut into patches of 4"):
        models.build({"name": "tiny/levit", "img_size": 30})
    with pytest.raises(BastionError, match="model.patch_size"):
        models.build({"name": "tiny/levit", "patch_size": 3})

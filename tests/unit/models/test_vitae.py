"""ViTAE for small images."""

from __future__ import annotations

import pytest
import torch

from bastion import BastionError
from bastion.models import complexity, models
from bastion.models.classifier import Classifier
from bastion.models.meta import meta
from bastion.models.vitae import PRM, Cells, NormalBlock, Performer, Reduction, ReductionCell

cifar_vitae = models.factory("cifar/vitae")
tiny_vitae = models.factory("tiny/vitae")


def test_parameters_are_those_of_the_paper_with_its_head() -> None:
    with meta():
        assert complexity.parameters(cifar_vitae(num_classes=1000).network) == 23_187_432
        network = cifar_vitae().network
        assert complexity.parameters(tiny_vitae().network) <= 1_500_000
    features = sum(buffer.numel() for name, buffer in network.named_buffers() if name.endswith("attn.w"))
    assert features == 4_096  # fixed
    assert complexity.parameters(network) + features == 22_810_378


def test_linear_attention_weighs_values_by_products_of_features() -> None:
    torch.manual_seed(0)
    attention, x = Performer(6, 4), torch.randn(2, 5, 6)
    assert torch.allclose(attention.w @ attention.w.T, 2 * torch.eye(2), atol=1e-5)
    k, q, v = attention.kqv(x).split(4, dim=-1)
    for image in range(2):
        for query in range(5):
            weights = torch.stack([attention.features(q[image, query]) @ attention.features(each) for each in k[image]])
            mixed = (weights / weights.sum()) @ v[image]
            expected = v[image, query] + attention.proj(mixed)
            assert torch.allclose(attention(x)[image, query], expected, atol=1e-5)


def test_features_are_those_of_the_exponential_kernel() -> None:
    """exp(w·x - |x|²/2) / √m: at w = 0 their product is exp(-(|q|² + |k|²)/2)."""
    attention = Performer(4, 4)
    attention.w.zero_()
    q, k = torch.randn(2, 4)
    expected = torch.exp(-(q.square().sum() + k.square().sum()) / 2)
    assert torch.allclose(attention.features(q) @ attention.features(k), expected)


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("kernel", [3, 7])
def test_all_dilations_and_the_convolutions_beside_them_make_one_grid(ratio: int, kernel: int) -> None:
    cell = Reduction(embed=2, tokens=4, kernel=kernel, ratio=ratio, dilations=4)
    with meta():
        x = torch.empty(1, 3, 16, 16)
        assert PRM(3, cell)(x).shape == (1, 8, 16 // ratio, 16 // ratio)
        assert ReductionCell(3, cell)(x).shape == (1, 4, 16 // ratio, 16 // ratio)


def test_a_normal_cell_adds_attention_and_convolutions_then_an_mlp() -> None:
    block = NormalBlock(8, Cells((), depth=1, heads=2, groups=2), drop_path=0.0).eval()
    x = torch.randn(2, 9, 8)
    local = block.PCM(x.transpose(1, 2).reshape(2, 8, 3, 3)).flatten(2).transpose(1, 2)
    middle = x + block.attn(block.norm1(x)) + local
    assert torch.allclose(block(x), middle + block.mlp(block.norm2(middle)), atol=1e-6)


@pytest.mark.parametrize("size", [32, 224])
def test_tokens_are_of_sixteen_pixels(size: int) -> None:
    with meta():
        model = Classifier(cifar_vitae(img_size=size), (0.5,) * 3, (0.5,) * 3).eval()
        with model.tap("attention", "blocks") as taps:
            assert model(torch.empty(1, 3, size, size)).shape == (1, 10)
    n = (size // 16) ** 2
    assert [tuple(each.shape) for each in taps.attention.values()] == [(1, 6, n, n)] * 14
    assert all(each.shape == (1, n, 384) for each in taps.blocks.values())


def test_images_that_do_not_divide_are_refused() -> None:
    with pytest.raises(BastionError, match="must be a multiple of 16, by which the map shrinks, got 40"):
        models.build({"name": "cifar/vitae", "img_size": 40})

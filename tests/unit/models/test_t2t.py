"""T2T-ViT: the published sizes, and each part against its definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bastion import BastionError
from bastion.models import checkpoint, complexity, models
from bastion.models.meta import meta
from bastion.models.t2t import TokensToToken, TokenTransformer, sinusoids


@pytest.mark.parametrize(("name", "parameters", "dim"), [("t2t/14", 21_541_070, 384), ("t2t/24", 64_101_454, 512)])
def test_sizes_have_the_published_parameters(name: str, parameters: int, dim: int) -> None:
    with meta():
        network = models.build(name).network
        trained = sum(each.numel() for each in network.parameters() if each.requires_grad)
        assert complexity.parameters(network) == parameters == trained + 197 * dim
        assert network.patch_embed(torch.empty(2, 3, 224, 224)).shape == (2, 196, dim)


def test_positions_are_sines_and_cosines_in_turn() -> None:
    table = sinusoids(5, 6)
    for position in range(5):
        for j in range(6):
            angle = position / 10_000 ** (2 * (j // 2) / 6)
            assert table[0, position, j].item() == pytest.approx(math.cos(angle) if j % 2 else math.sin(angle))


def test_a_token_transformer_keeps_its_values_beside_what_it_attends_to() -> None:
    torch.manual_seed(0)
    layer = TokenTransformer(9, 4).double()
    x = torch.randn(2, 5, 9, dtype=torch.float64)
    q, k, v = layer.attn.qkv(layer.norm1(x)).split(4, dim=2)
    mixed = torch.zeros(2, 5, 4, dtype=torch.float64)
    for image in range(2):
        for query in range(5):
            weights = torch.stack([(q[image, query] @ k[image, key] / 3).exp() for key in range(5)])  # 3 = √9
            mixed[image, query] = weights / weights.sum() @ v[image]
    middle = v + layer.attn.proj(mixed)
    expected = middle + layer.mlp.fc2(F.gelu(layer.mlp.fc1(layer.norm2(middle))))
    torch.testing.assert_close(layer(x), expected)


def test_a_soft_split_with_its_projection_is_a_convolution() -> None:
    torch.manual_seed(0)
    stem = TokensToToken(32, 8, 3, 10, token_dim=4)
    tokens = torch.randn(2, 64, 4)
    stem.attention2.forward = lambda x: tokens  # type: ignore[method-assign]
    image = tokens.transpose(1, 2).reshape(2, 4, 8, 8)
    expected = F.conv2d(image, stem.project.weight.view(10, 4, 3, 3), stem.project.bias, stride=2, padding=1)
    torch.testing.assert_close(stem(torch.rand(2, 3, 32, 32)), expected.flatten(2).transpose(1, 2))


@pytest.mark.parametrize(("patch_size", "side"), [(16, 2), (8, 4), (4, 8)])
def test_finer_patches_have_the_weights_of_coarse_ones(patch_size: int, side: int) -> None:
    stem = TokensToToken(32, patch_size, 3, 16)
    stem.load_state_dict(TokensToToken(224, 16, 3, 16).state_dict())
    assert stem.grid_size == (side, side)
    assert stem(torch.rand(1, 3, 32, 32)).shape == (1, side * side, 16)


def test_tokens_are_in_the_order_of_the_image() -> None:
    """With attention off, a corner of the image moves the tokens of that corner only."""
    torch.manual_seed(0)
    stem = TokensToToken(64, 8, 3, 16)
    for layer in (stem.attention1, stem.attention2):
        layer.attn.proj.weight.data.zero_()
    x = torch.rand(1, 3, 64, 64)
    y = x.clone()
    y[..., :8, 56:] = 0.0
    moved = (stem(x) != stem(y)).any(-1).view(8, 8)
    assert moved[0, 7] and moved[1, 6]
    assert not moved[3:].any() and not moved[:, :5].any()


def test_drop_path_grows_with_depth() -> None:
    with meta():
        network = models.build({"name": "t2t/14", "drop_path_rate": 0.13}).network
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in network.blocks]
    assert rates == pytest.approx([0.01 * number for number in range(14)])


def test_the_small_size_shows_blocks_and_maps_and_needs_no_batch() -> None:
    model = checkpoint.build("tiny/t2t", mean=(0.5,) * 3, std=(0.25,) * 3).eval()
    assert complexity.parameters(model) <= 1_500_000
    assert model.no_weight_decay() == {"network.cls_token", "network.pos_embed"}
    x = torch.rand(3, 3, 32, 32)
    with model.tap("blocks", "attention") as taps:
        logits = model(x)
    names = [f"blocks.{i}" for i in range(6)]  # not the stem's transformers, which have other tokens
    assert list(taps.attention) == names == list(taps.blocks)
    assert all(taps.attention[name].shape == (3, 4, 65, 65) for name in names)
    torch.testing.assert_close(model(x[1:2]), logits[1:2], rtol=1e-4, atol=1e-5)


def test_the_position_table_is_not_trained() -> None:
    network = models.build("tiny/t2t").network
    network(torch.rand(2, 3, 32, 32)).sum().backward()
    assert {name for name, each in network.named_parameters() if each.grad is None} == {"pos_embed"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "t2t/14", "patch_size": 2}, r"patch_size: expected one of \[4, 8, 16\], got 2"),
        ({"name": "t2t/14", "img_size": 100}, "img_size: 100 cannot be cut into patches of 16"),
    ],
)
def test_what_cannot_be_built_says_why(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(BastionError, match=message), meta():
        models.build(spec)

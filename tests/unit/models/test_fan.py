"""FAN: the published sizes, and each part against its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bastion import BastionError
from bastion.models import checkpoint, complexity, models
from bastion.models.fan import ChannelGate, ConvFFN, HybridStem, PlainStem, TokenAttention
from bastion.models.meta import meta


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [
        ({"name": "fan/hybrid-t"}, 7_467_240),
        ({"name": "fan/hybrid-s"}, 26_117_944),
        ({"name": "fan/hybrid-s", "num_classes": 10}, 25_736_794),
        ({"name": "fan/hybrid-b"}, 50_475_048),
        ({"name": "fan/hybrid-l"}, 76_855_140),
        ({"name": "fan/vit-t"}, 7_319_920),
        ({"name": "fan/vit-s"}, 28_345_336),
        ({"name": "fan/vit-b"}, 54_350_320),
        ({"name": "fan/vit-l"}, 80_574_100),
    ],
)
def test_sizes_have_the_published_parameters(spec: dict[str, Any], parameters: int) -> None:
    with meta():
        assert complexity.parameters(models.build(spec).network) == parameters


def test_weights_are_named_as_in_the_released_files() -> None:
    with meta():
        names = set(models.build("fan/hybrid-t").network.state_dict())
    block = {
        *("gamma1", "gamma2", "norm1.weight", "norm2.weight", "attn.q.weight", "attn.kv.weight", "attn.proj.weight"),
        *("mlp.temperature", "mlp.q.weight", "mlp.norm_v.weight", "mlp.mlp_v.gamma"),
        *("mlp.mlp_v.fc1.weight", "mlp.mlp_v.fc2.weight", "mlp.mlp_v.dwconv.conv1.weight"),
        *("mlp.mlp_v.dwconv.bn.weight", "mlp.mlp_v.dwconv.conv2.weight"),
    }
    assert {f"blocks.7.{name}" for name in block} <= names
    assert {
        *("patch_embed.backbone.stem.0.weight", "patch_embed.backbone.stages.1.downsample.1.weight"),
        *("patch_embed.backbone.stages.1.blocks.2.conv_dw.weight", "patch_embed.proj.weight"),
        *("pos_embed.token_projection.weight", "cls_attn_blocks.1.attn.q.weight", "cls_token", "head.weight"),
    } <= names


def test_token_attention_is_that_of_torch() -> None:
    torch.manual_seed(0)
    own, reference = TokenAttention(12, 3), torch.nn.MultiheadAttention(12, 3, batch_first=True)
    reference.in_proj_weight.data = torch.cat([own.q.weight, own.kv.weight]).detach()
    reference.in_proj_bias.data = torch.cat([own.q.bias, own.kv.bias]).detach()
    reference.out_proj.load_state_dict(own.proj.state_dict())
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(own(x), reference(x, x, x)[0])


def test_the_gate_is_computed_head_by_head_over_the_tokens() -> None:
    torch.manual_seed(0)
    gate = ChannelGate(12, 3).double().eval()
    gate.temperature.data.uniform_(0.5, 2.0)
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    value = gate.norm_v(gate.mlp_v(x, (2, 3)))
    query = gate.q(x)
    expected = torch.zeros_like(x)
    for image in range(2):
        for head in range(3):
            of = slice(4 * head, 4 * head + 4)
            keys = torch.softmax(x[image, :, of], dim=0).mean(dim=1)  # (N,)
            for channel in range(4 * head, 4 * head + 4):
                match = torch.softmax(query[image, :, channel], dim=0) @ keys
                expected[image, :, channel] = gate.temperature[head, 0, 0] * match.sigmoid() * value[image, :, channel]
    torch.testing.assert_close(gate(x, (2, 3)), expected)
    assert gate.norm_v.eps == 1e-5


def test_the_ffn_adds_depthwise_convolutions_between_its_layers() -> None:
    torch.manual_seed(0)
    ffn = ConvFFN(4, 8).double().eval()
    ffn.gamma.data.normal_()
    x = torch.randn(1, 6, 4, dtype=torch.float64)
    hidden = ffn.fc1(x)
    image = hidden[0].T.reshape(1, 8, 2, 3)
    local = ffn.dwconv.conv2(ffn.dwconv.bn(torch.nn.functional.gelu(ffn.dwconv.conv1(image))))
    expected = ffn.fc2(hidden + ffn.gamma * local.reshape(8, 6).T)
    torch.testing.assert_close(ffn(x, (2, 3)), expected)
    assert ffn.dwconv.conv1.weight.std().item() == pytest.approx((2 / 9) ** 0.5, rel=0.25)


@pytest.mark.parametrize(("patch_size", "side"), [(16, 2), (8, 4), (4, 8), (2, 16)])
def test_plain_stems_of_all_patch_sizes_share_weights(patch_size: int, side: int) -> None:
    stem = PlainStem(32, patch_size, 3, 16)
    stem.load_state_dict(PlainStem(224, 16, 3, 16).state_dict())
    assert stem.grid_size == (side, side)
    assert stem(torch.rand(1, 3, 32, 32)).shape == (1, 16, side, side)


@pytest.mark.parametrize(("patch_size", "side"), [(16, 2), (8, 4)])
def test_hybrid_stems_of_all_patch_sizes_share_weights(patch_size: int, side: int) -> None:
    stem = HybridStem(32, patch_size, 3, 16, (1, 1))
    stem.load_state_dict(HybridStem(224, 16, 3, 16, (1, 1)).state_dict())
    assert stem.grid_size == (side, side)
    assert stem(torch.rand(1, 3, 32, 32)).shape == (1, 16, side, side)


def test_native_images_make_fourteen_by_fourteen_tokens() -> None:
    with meta():
        x = torch.empty(2, 3, 224, 224)
        assert PlainStem(224, 16, 3, 192)(x).shape == HybridStem(224, 16, 3, 192, (3, 3))(x).shape == (2, 192, 14, 14)


def test_drop_path_is_the_same_in_every_block() -> None:
    with meta():
        network = models.build({"name": "fan/vit-t", "drop_path_rate": 0.1}).network
    assert [block.drop_path.drop_prob for block in network.blocks] == [0.1] * 12


@pytest.mark.parametrize(("name", "std"), [("fan/vit-l", 2e-5), ("fan/vit-t", 2e-2)])
def test_only_large_models_start_with_a_small_head(name: str, std: float) -> None:
    assert models.build(name).network.head.weight.std().item() == pytest.approx(std, rel=0.05)


def test_the_small_size_shows_the_token_maps_and_needs_no_batch() -> None:
    model = checkpoint.build("tiny/fan", mean=(0.5,) * 3, std=(0.25,) * 3).eval()
    assert complexity.parameters(model) <= 1_500_000
    x = torch.rand(3, 3, 32, 32)
    with model.tap("blocks", "attention") as taps:
        logits = model(x)
    blocks = [f"blocks.{i}" for i in range(6)]
    assert list(taps.attention) == [*blocks, "cls_attn_blocks.0", "cls_attn_blocks.1"]
    for name in blocks:
        assert taps.attention[name].shape == (3, 4, 64, 64)
        torch.testing.assert_close(taps.attention[name].sum(-1), torch.ones(3, 4, 64))
    assert taps.attention["cls_attn_blocks.1"].shape == (3, 4, 1, 65)
    assert taps.blocks["blocks.5"].shape == (3, 64, 96)
    torch.testing.assert_close(model(x[1:2]), logits[1:2], rtol=1e-4, atol=1e-5)


def test_a_hybrid_takes_small_images_with_patches_of_eight() -> None:
    spec = {"name": "fan/hybrid-t", "img_size": 32, "patch_size": 8, "num_classes": 10}
    model = checkpoint.build(spec, mean=(0.5,) * 3, std=(0.25,) * 3).eval()
    with model.tap("attention") as taps:
        assert model(torch.rand(1, 3, 32, 32)).shape == (1, 10)
    assert taps.attention["blocks.7"].shape == (1, 8, 16, 16)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "fan/hybrid-t", "patch_size": 4}, r"patch_size: expected one of \[8, 16\], got 4"),
        ({"name": "fan/vit-t", "patch_size": 3}, r"patch_size: expected one of \[2, 4, 8, 16\], got 3"),
        ({"name": "fan/vit-t", "img_size": 100}, "img_size: 100 cannot be cut into patches of 16"),
    ],
)
def test_what_cannot_be_built_says_why(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(BastionError, match=message), meta():
        models.build(spec)

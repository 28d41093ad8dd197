"""RVT: the published sizes, and each part against its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bastion import BastionError
from bastion.models import checkpoint, complexity, models
from bastion.models.meta import meta
from bastion.models.rvt import Attention, ConvFFN, PatchEmbed


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [
        ({"name": "rvt/ti"}, 10_951_336),
        ({"name": "rvt/ti", "masked_blocks": 0}, 8_646_376),
        ({"name": "rvt/ti", "qkv": "conv"}, 10_952_008),
        ({"name": "rvt/s"}, 23_300_872),
        ({"name": "rvt/s", "masked_blocks": 0}, 22_148_392),
        ({"name": "rvt/s", "qkv": "conv"}, 23_302_024),
        ({"name": "rvt/s", "num_classes": 10}, 22_919_722),
        ({"name": "rvt/b"}, 88_528_744),
        ({"name": "rvt/b", "masked_blocks": 0}, 86_223_784),
        ({"name": "rvt/b", "masked_blocks": 12}, 91_755_688),
        ({"name": "rvt/b", "qkv": "conv"}, 88_531_048),
    ],
)
def test_sizes_have_the_published_parameters(spec: dict[str, Any], parameters: int) -> None:
    with meta():
        assert complexity.parameters(models.build(spec).network) == parameters


def test_weights_are_named_as_in_the_released_files() -> None:
    with meta():
        names = set(models.build("rvt/ti").network.state_dict())
        conv = set(models.build({"name": "rvt/ti", "qkv": "conv"}).network.state_dict())
    layers = {
        *(f"patch_embed.proj.{index}" for index in (0, 1, 3)),
        *("transformers.1.blocks.1.attn.qkv", "transformers.1.blocks.1.attn.proj", "pools.0.conv", "norm", "head"),
        *(f"transformers.0.blocks.9.mlp.{part}" for part in ("fc1", "bn1", "dwconv", "bn2", "fc2", "bn3")),
    }
    assert {f"{layer}.weight" for layer in layers} <= names
    assert {name.partition(".attn.")[2] for name in conv if "patch_reasoning" in name} == {
        f"patch_reasoning.{index}.{kind}" for index in (0, 2) for kind in ("weight", "bias")
    }


@pytest.mark.parametrize(("name", "count"), [("rvt/ti", 10), ("rvt/s", 5), ("rvt/b", 5)])
def test_the_first_blocks_scale_by_position(name: str, count: int) -> None:
    with meta():
        state = models.build(name).network.state_dict()
    masks = {key: tensor.shape for key, tensor in state.items() if key.endswith("att_mask")}
    heads = 12 if name == "rvt/b" else 6
    assert masks == {f"transformers.0.blocks.{i}.attn.att_mask": (heads, 196, 196) for i in range(count)}


def test_the_second_stage_has_a_quarter_of_the_tokens_and_twice_the_width() -> None:
    with meta():
        network = models.build("rvt/ti").network
        image = network.patch_embed(torch.empty(2, 3, 224, 224))
        assert image.shape == (2, 192, 14, 14)
        assert network.pools[0](image).shape == (2, 384, 7, 7)
        assert network(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


@pytest.mark.parametrize(("patch_size", "side"), [(16, 2), (8, 4), (4, 8)])
def test_finer_patches_have_the_weights_of_coarse_ones(patch_size: int, side: int) -> None:
    stem, coarse = PatchEmbed(32, patch_size, 3, 24), PatchEmbed(224, 16, 3, 24)
    stem.load_state_dict(coarse.state_dict())
    assert stem.grid_size == (side, side)
    assert stem(torch.rand(1, 3, 32, 32)).shape == (1, 24, side, side)


def test_attention_is_the_sum_that_its_definition_gives() -> None:
    torch.manual_seed(0)
    attention = Attention(8, 2, "linear", tokens=6).double()
    assert attention.att_mask is not None and attention.qkv is not None
    attention.att_mask.data.normal_()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    q, k, v = attention.qkv(x).split(8, dim=2)
    mixed = torch.zeros_like(x)
    for head in range(2):
        of = slice(4 * head, 4 * head + 4)
        gain = 1 / (1 + torch.exp(-attention.att_mask[head]))
        for image in range(2):
            for query in range(6):
                logits = torch.stack([q[image, query, of] @ k[image, key, of] / 2 for key in range(6)]) * gain[query]
                weights = logits.exp() / logits.exp().sum()
                mixed[image, query, of] = weights @ v[image, :, of]
    torch.testing.assert_close(attention(x, (2, 3)), attention.proj(mixed))


def test_a_scaling_of_one_is_no_scaling() -> None:
    torch.manual_seed(0)
    plain, scaled = Attention(8, 2, "linear", None).double(), Attention(8, 2, "linear", 6).double()
    scaled.load_state_dict(plain.state_dict(), strict=False)
    assert scaled.att_mask is not None
    scaled.att_mask.data.fill_(40.0)  # sigmoid of it is 1
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    torch.testing.assert_close(plain(x, (2, 3)), scaled(x, (2, 3)))


def test_convolutional_queries_see_their_neighbours_on_the_grid() -> None:
    torch.manual_seed(0)
    rows, columns, dim = 3, 2, 12
    attention = Attention(dim, 2, "conv", None).double()
    assert attention.patch_reasoning is not None
    spread, _, mix = attention.patch_reasoning
    assert isinstance(spread, nn.Conv2d) and isinstance(mix, nn.Conv2d)
    assert spread.bias is not None and mix.bias is not None
    x = torch.randn(1, rows * columns, dim, dtype=torch.float64)
    expected = []
    for row in range(rows):
        for column in range(columns):
            hidden = spread.bias.clone()
            for i in range(max(row - 1, 0), min(row + 2, rows)):
                for j in range(max(column - 1, 0), min(column + 2, columns)):
                    hidden = hidden + spread.weight[:, :, i - row + 1, j - column + 1] @ x[0, i * columns + j]
            expected.append(mix.weight[:, :, 0, 0] @ hidden.clamp(min=0) + mix.bias)
    torch.testing.assert_close(attention._project(x, (rows, columns))[0], torch.stack(expected))


def test_the_ffn_mixes_each_token_with_its_neighbours_only() -> None:
    torch.manual_seed(0)
    ffn = ConvFFN(4, 16).eval()
    x = torch.randn(1, 20, 4)
    y = x.clone()
    y[0, 6] += 1.0  # row 1, column 1 of 4 × 5
    moved = (ffn(x, (4, 5)) != ffn(y, (4, 5))).any(-1).view(4, 5)
    assert moved[:3, :3].all()
    assert moved.sum() == 9


def test_drop_path_grows_with_depth_over_both_stages() -> None:
    with meta():
        network = models.build({"name": "rvt/ti", "drop_path_rate": 0.12}).network
    rates = [block.drop_path.drop_prob for stage in network.transformers for block in stage.blocks]
    assert rates == pytest.approx([0.01 * number for number in range(12)])


def test_the_small_size_shows_blocks_and_maps_and_needs_no_batch() -> None:
    model = checkpoint.build("tiny/rvt", mean=(0.5,) * 3, std=(0.25,) * 3).eval()
    assert complexity.parameters(model) <= 1_500_000
    x = torch.rand(3, 3, 32, 32)
    with model.tap("blocks", "attention") as taps:
        logits = model(x)
    names = [*(f"transformers.0.blocks.{i}" for i in range(5)), "transformers.1.blocks.0"]
    assert [block.name for block in model.blocks()] == names == list(taps.attention)
    assert [tuple(taps.attention[name].shape) for name in names] == [(3, 3, 64, 64)] * 5 + [(3, 6, 16, 16)]
    assert [tuple(taps.blocks[name].shape) for name in names] == [(3, 64, 96)] * 5 + [(3, 16, 192)]
    torch.testing.assert_close(model(x[1:2]), logits[1:2])


def test_without_scaling_any_grid_will_do() -> None:
    network = models.build({"name": "tiny/rvt", "masked_blocks": 0}).network.eval()
    assert network(torch.rand(1, 3, 48, 48)).shape == (1, 10)
    with pytest.raises(ValueError, match="made for 64 tokens, got 144; set img_size"):
        models.build("tiny/rvt").network.eval()(torch.rand(1, 3, 48, 48))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "rvt/ti", "masked_blocks": 11}, r"masked_blocks: expected 0 to 10 \(of the first stage\), got 11"),
        ({"name": "rvt/s", "masked_blocks": -1}, "masked_blocks: expected 0 to 12"),
        ({"name": "rvt/ti", "patch_size": 5}, r"patch_size: expected one of \[4, 8, 16\], got 5"),
        ({"name": "rvt/ti", "img_size": 40}, "img_size: 40 cannot be cut into patches of 16"),
        ({"name": "rvt/ti", "img_size": 0}, "img_size: 0 cannot be cut"),
        ({"name": "rvt/ti", "qkv": "dense"}, "model.qkv: unknown qkv 'dense'; known: conv, linear"),
    ],
)
def test_what_cannot_be_built_says_why(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(BastionError, match=message), meta():
        models.build(spec)

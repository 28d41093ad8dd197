"""ViT and CoViT of Wang and Ruan 2022: sizes, both mixers against loops, what they begin with."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from bastion import BastionError
from bastion.models import Classifier, complexity, models
from bastion.models.cauchy import Attention, TokenConvolutions
from bastion.models.meta import meta

PARAMETERS = {
    "vit-cauchy/t1": 918_410,
    "vit-cauchy/t2": 918_410,
    "vit-cauchy/t3": 1_711_498,
    "vit-cauchy/t4": 1_711_498,
    "vit-cauchy/s1": 3_653_642,
    "vit-cauchy/s2": 3_653_642,
    "vit-cauchy/s3": 13_110_794,
    "vit-cauchy/s4": 13_110_794,
    "vit-cauchy/m1": 25_720_330,
    "vit-cauchy/m2": 25_720_330,
    "vit-cauchy/m3": 26_824_714,
    "vit-cauchy/l": 39_434_250,
    "covit/t1": 917_386,
    "covit/t2": 769_930,
    "covit/t3": 1_709_450,
    "covit/t4": 1_414_538,
    "covit/s1": 3_652_618,
    "covit/s2": 3_062_794,
    "covit/s3": 13_106_698,
    "covit/s4": 10_747_402,
    "covit/s5": 11_795_978,
    "covit/m1": 25_712_138,
    "covit/m2": 21_517_834,
    "covit/m3": 20_993_546,
    "covit/m4": 23_090_698,
    "covit/m5": 22_097_930,
    "covit/l1": 31_557_642,
    "covit/l2": 41_541_642,
}
HEADS = {"t1": 1, "t2": 4, "t3": 1, "t4": 4, "s1": 1, "s2": 4, "s3": 1, "s4": 4, "m1": 1, "m2": 4, "m3": 4, "l": 8}


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes_are_those_of_the_authors_code(name: str) -> None:
    with meta():
        backbone = models.build(name)
    assert complexity.parameters(backbone.network) == PARAMETERS[name]
    assert (backbone.num_classes, backbone.shape) == (10, (3, 224, 224))
    family, _, size = name.partition("/")
    if family == "vit-cauchy":
        assert backbone.network.blocks[0].mixer.heads == HEADS[size]


def test_queries_and_keys_alternate() -> None:
    attention = Attention(12, 3)
    x = torch.randn(2, 5, 12)
    made, values = attention.qk(x), attention.v(x)
    heads = []
    for head in range(3):
        q, k = made[..., 8 * head : 8 * head + 8 : 2], made[..., 8 * head + 1 : 8 * head + 8 : 2]
        heads.append((q @ k.transpose(1, 2) / 2.0).softmax(-1) @ values[..., 4 * head : 4 * head + 4])
    assert torch.allclose(attention(x), attention.projection(torch.cat(heads, -1)), atol=1e-6)


def test_groups_of_channels_are_convolved_along_the_tokens() -> None:
    mixer = TokenConvolutions(8, (1, 3, 5, 7))
    x = torch.randn(2, 9, 8)
    expected = torch.zeros(2, 9, 8)
    for group, (kernel, conv) in enumerate(zip((1, 3, 5, 7), mixer.conv1d_list, strict=True)):
        part = F.pad(x[..., 2 * group : 2 * group + 2], (0, 0, kernel // 2, kernel // 2))
        for place in range(9):
            window = part[:, place : place + kernel]  # (B, kernel, 2)
            expected[:, place, 2 * group : 2 * group + 2] = torch.einsum("bki,oik->bo", window, conv.weight) + conv.bias
    assert torch.allclose(mixer(x), mixer.projection(expected), atol=1e-6)


@pytest.mark.parametrize("name", ["tiny/vit-cauchy", "tiny/covit"])
def test_the_mean_of_all_tokens_is_classified(name: str) -> None:
    network = models.build(name).network.eval()
    x = torch.rand(2, 3, 32, 32)
    patches = network.patch_embed.proj(x).flatten(2).transpose(1, 2)
    tokens = torch.cat([network.cls_token.repeat(2, 1, 1), patches], 1) + network.pos_embed
    assert tokens.shape == (2, 65, 96)
    for block in network.blocks:
        tokens = tokens + block.mixer(F.layer_norm(tokens, (96,), eps=1e-5))
        hidden = F.gelu(block.mlp.fc1(F.layer_norm(tokens, (96,), eps=1e-5)))
        tokens = tokens + block.mlp.fc2(hidden)
    expected = network.head(F.layer_norm(tokens.sum(1) / 65, (96,), eps=1e-5))
    assert torch.allclose(network(x), expected, atol=1e-5)


def test_class_token_and_positions_begin_as_unit_normals_and_are_not_decayed() -> None:
    network = models.build("vit-cauchy/t1").network
    for parameter in (network.cls_token, network.pos_embed):
        assert parameter.std().item() == pytest.approx(1.0, abs=0.2)
    assert network.pos_embed.shape == (1, 197, 128)
    assert network.no_weight_decay() == {"cls_token", "pos_embed"}


@pytest.mark.parametrize(("name", "attends"), [("vit-cauchy/t2", True), ("covit/t2", False)])
def test_small_images_with_small_patches(name: str, attends: bool) -> None:
    backbone = models.build({"name": name, "img_size": 32, "patch_size": 4, "num_classes": 7})
    model = Classifier(backbone, (0.5,) * 3, (0.25,) * 3).eval()
    assert model(torch.rand(1, 3, 32, 32)).shape == (1, 7)
    assert {block.attention for block in model.blocks()} == {"tokens" if attends else None}
    if attends:
        with torch.no_grad(), model.tap("attention") as taps:
            model(torch.rand(2, 3, 32, 32))
        assert taps.attention["blocks.3"].shape == (2, 4, 65, 65)


@pytest.mark.parametrize("name", ["tiny/vit-cauchy", "tiny/covit"])
def test_tiny_ones_are_small(name: str) -> None:
    assert complexity.parameters(models.build(name).network) <= 1_500_000


def test_the_authors_names_become_ours() -> None:
    theirs = ["0.cls", "0.pos", "0.projection.0.weight", "0.projection.0.bias"]
    parts = ["0.fn.0", "0.fn.1.qk", "0.fn.1.v", "0.fn.1.projection", "1.fn.0", "1.fn.1.0", "1.fn.1.3"]
    theirs += [f"1.{block}.{part}.{kind}" for block in range(4) for part in parts for kind in ("weight", "bias")]
    theirs += [f"2.{part}.{kind}" for part in (1, 2) for kind in ("weight", "bias")]
    backbone = models.build("tiny/vit-cauchy")
    for pattern, to in backbone.renames:
        theirs = [re.sub(f"^{pattern}$", to, name) for name in theirs]
    assert set(theirs) == set(backbone.network.state_dict())


def test_patches_must_fit() -> None:
    with pytest.raises(BastionError, match="32 cannot be cut into patches of 5"):
        models.build({"name": "covit/t1", "img_size": 32, "patch_size": 5})

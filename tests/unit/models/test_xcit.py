"""XCiT: sizes of the thesis, attention between channels, one stem for patches of 16, 8, 4 and 2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bastion import BastionError
from bastion.models import Classifier, complexity, models
from bastion.models.meta import meta


def _meta(name: str, **options: Any) -> Classifier:
    with meta():
        return Classifier(models.build({"name": name, **options}), (0.5,) * 3, (0.25,) * 3)


@pytest.mark.parametrize(
    ("size", "parameters", "gmacs"),
    [
        ("n12", 3_053_224, 0.55),
        ("s12", 26_253_304, 4.80),
        ("m12", 46_401_160, 8.51),
        ("l12", 103_792_648, 18.93),
    ],
)
def test_sizes_and_costs_are_those_of_the_thesis(size: str, parameters: int, gmacs: float) -> None:
    model = _meta(f"xcit/{size}")
    assert complexity.parameters(model) == parameters
    assert complexity.macs(model) / 1e9 == pytest.approx(gmacs, abs=0.0051)


@pytest.mark.parametrize(
    ("size", "parameters", "gmacs"),
    [("s12", 25_872_154, 1.56), ("m12", 45_893_290, 2.78), ("l12", 103_031_338, 6.18)],
)
def test_sizes_and_costs_at_32_pixels(size: str, parameters: int, gmacs: float) -> None:
    model = _meta(f"xcit/{size}", num_classes=10, img_size=32, patch_size=4)
    assert complexity.parameters(model) == parameters
    assert complexity.macs(model) / 1e9 == pytest.approx(gmacs, abs=0.0051)


def test_at_the_native_size_it_is_timms() -> None:
    torch.manual_seed(0)
    ours = models.build("xcit/n12").network.eval()
    torch.manual_seed(0)
    theirs = models.build("timm/xcit_nano_12_p16_224").network.eval()
    x = torch.rand(1, 3, 64, 64)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize(
    ("patch", "strides"), [(16, [2, 2, 2, 2]), (8, [1, 2, 2, 2]), (4, [1, 1, 2, 2]), (2, [1, 1, 1, 2])]
)
def test_finer_patches_take_the_first_strides_away_and_keep_the_weights(patch: int, strides: list[int]) -> None:
    network = models.build({"name": "tiny/xcit", "patch_size": patch}).network.eval()
    stem = network.patch_embed
    assert [stem.proj[index][0].stride[0] for index in (0, 2, 4, 6)] == strides
    tokens, grid = stem(torch.rand(1, 3, 32, 32))
    assert grid == stem.grid_size == (32 // patch, 32 // patch)
    assert tokens.shape[1] == stem.num_patches
    assert stem.patch_size == (patch, patch)
    network.load_state_dict(models.build({"name": "tiny/xcit", "patch_size": 16}).network.state_dict())


def test_channels_attend_to_channels() -> None:
    """Eq. of XCA, one head after the other: d × d maps of unit-length rows, times a temperature."""
    model = Classifier(models.build("tiny/xcit"), (0.5,) * 3, (0.25,) * 3).eval()
    attention = model.network.blocks[0].attn
    with torch.no_grad():
        attention.temperature.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]).view(4, 1, 1))
        attention.qkv.weight.normal_()
    x = torch.randn(2, 64, 96)
    q, k, v = attention.qkv(x).chunk(3, dim=-1)
    heads = []
    for head in range(4):
        part = slice(24 * head, 24 * (head + 1))
        queries, keys = (F.normalize(each[..., part], dim=1) for each in (q, k))  # along the tokens
        maps = ((head + 1) * queries.transpose(1, 2) @ keys).softmax(-1)
        heads.append((maps @ v[..., part].transpose(1, 2)).transpose(1, 2))
    assert torch.allclose(attention(x), attention.proj(torch.cat(heads, -1)), atol=1e-5)
    with torch.no_grad(), model.tap("attention") as taps:
        model(torch.rand(2, 3, 32, 32))
    assert taps.attention["blocks.3"].shape == (2, 4, 24, 24)


def test_drop_path_is_the_same_in_every_block() -> None:
    network = models.build({"name": "tiny/xcit", "drop_path_rate": 0.1}).network
    assert [block.drop_path1.drop_prob for block in network.blocks] == [0.1] * 4


def test_sizes_that_16_does_not_divide_are_fine_with_finer_patches() -> None:
    assert models.build({"name": "tiny/xcit", "img_size": 28}).network(torch.rand(2, 3, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 32}, "patch_size: expected one of .2, 4, 8, 16., got 32"),
        ({"img_size": 40, "patch_size": 16}, "40 cannot be cut into patches of 16"),
    ],
)
def test_what_cannot_be_built_says_why(options: dict[str, int], message: str) -> None:
    with pytest.raises(BastionError, match=message):
        models.build({"name": "xcit/n12", **options})


def test_the_tiny_one_is_small() -> None:
    assert complexity.parameters(models.build("tiny/xcit").network) <= 1_500_000

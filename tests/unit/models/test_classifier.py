"""The classifier normalises by itself, and shows blocks and attention only when asked."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from bastion import BastionError
from bastion.models import Backbone, Classifier, checkpoint, models
from bastion.models.classifier import Blocks
from bastion.models.meta import meta

MEAN, STD = (0.5, 0.4, 0.3), (0.1, 0.2, 0.3)


def _build(name: str, **options: object) -> Classifier:
    return checkpoint.build({"name": name, **options}, mean=MEAN, std=STD).eval()


@pytest.fixture(scope="module")
def vit() -> Classifier:
    return _build("vit/micro", depth=2, embed_dim=32)


def test_normalisation_is_inside(vit: Classifier) -> None:
    x = torch.rand(2, 3, 32, 32)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    assert torch.allclose(vit(x), vit.network((x - mean) / std))


def test_blocks_come_in_order(vit: Classifier) -> None:
    assert [block.name for block in vit.blocks()] == ["blocks.0", "blocks.1"]
    assert vit.blocks()[1].module is vit.network.blocks[1]


def test_tapped_blocks_are_the_blocks_outputs(vit: Classifier) -> None:
    x = torch.rand(2, 3, 32, 32)
    with vit.tap("blocks") as taps:
        vit(x)
    tokens = vit.network._pos_embed(vit.network.patch_embed((x - vit.mean) / vit.std))
    first = vit.network.blocks[0](tokens)
    assert torch.allclose(taps.blocks["blocks.0"], first, atol=1e-6)
    assert torch.allclose(taps.blocks["blocks.1"], vit.network.blocks[1](first), atol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_attention_is_softmax_of_scaled_products_fused_or_not(vit: Classifier, fused: bool) -> None:
    for block in vit.network.blocks:
        block.attn.fused_attn = fused
    x = torch.rand(3, 3, 32, 32)
    expected = vit(x)
    with vit.tap("attention", "blocks") as taps:
        got = vit(x)
    attention = vit.network.blocks[1].attn
    tokens = vit.network.blocks[1].norm1(taps.blocks["blocks.0"])
    q, k, _ = attention.qkv(tokens).reshape(3, 64, 3, 4, 8).permute(2, 0, 3, 1, 4)
    scores = (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1)
    assert torch.allclose(taps.attention["blocks.1"], scores, atol=1e-6)
    assert torch.allclose(got, expected, atol=1e-5)  # watching does not change the answer


def test_attention_maps_carry_gradient(vit: Classifier) -> None:
    x = torch.rand(1, 3, 32, 32, requires_grad=True)
    with vit.tap("attention") as taps:
        vit(x)
    (gradient,) = torch.autograd.grad(taps.attention["blocks.0"][:, :, :, 0].log().sum(), x)
    assert gradient.abs().sum() > 0


def test_nothing_is_left_behind_after_a_tap(vit: Classifier) -> None:
    with vit.tap("attention", "blocks") as taps:
        vit(torch.rand(1, 3, 32, 32))
    kept = dict(taps.blocks)
    vit(torch.rand(1, 3, 32, 32))
    assert all(taps.blocks[name] is tensor for name, tensor in kept.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in vit.modules())


@pytest.mark.parametrize(
    ("name", "blocks", "shape"),
    [
        ("timm/xcit_nano_12_p16_224", 14, (1, 4, 32, 32)),  # channel attention
        ("timm/cait_xxs24_224", 26, (1, 4, 196, 196)),  # talking heads
        ("timm/swin_tiny_patch4_window7_224", 12, (64, 3, 49, 49)),  # windows
    ],
)
def test_other_families_show_their_own_kind_of_attention(name: str, blocks: int, shape: tuple[int, ...]) -> None:
    model = _build(name)
    with torch.no_grad(), model.tap("attention") as taps:
        model(torch.rand(1, *model.shape))
    assert len(taps.attention) == blocks
    maps = list(taps.attention.values())
    assert maps[0].shape == shape
    assert all(torch.allclose(each.sum(-1), torch.ones(())) for each in maps)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("fan/hybrid-t", {None: 6, "tokens": 8, "class": 2}),  # a ConvNeXt stem, and class attention at the end
        ("cait/s12", {"tokens": 12, "class": 2}),
        ("xcit/s12", {"channels": 12, "class": 2}),
        ("rvt/ti", {"tokens": 12}),
        ("cifar/botnet", {None: 13, "tokens": 3}),
        ("cifar/coatnet", {None: 5, "tokens": 7}),
        ("covit/t1", {None: 4}),
        ("timm/twins_svt_small", {"windows": 9, "tokens": 9}),
        ("timm/vit_base_r50_s16_224", {None: 16, "tokens": 12}),
        ("timm/tf_efficientnet_lite0", {None: 16}),
    ],
)
def test_blocks_say_what_they_attend_to(name: str, kinds: dict[str | None, int]) -> None:
    with meta():
        blocks = Classifier(models.build(name), MEAN, STD).blocks()
    assert Counter(block.attention for block in blocks) == kinds
    assert sum(block.attends for block in blocks) == sum(kinds.values()) - kinds.get("class", 0) - kinds.get(None, 0)


def test_blocks_are_the_modules_that_a_backbone_declares() -> None:
    layers = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.ReLU()), nn.Sequential(nn.Linear(2, 2)))
    network = nn.ModuleDict({"stages": layers, "stages_of_another": nn.Sequential(nn.Sequential())})
    declared = (Blocks("stages.*", "windows", having="0.weight_norm"), Blocks("stages.*", having="0"))
    model = Classifier(Backbone(network, 2, (3, 4, 4), blocks=declared), MEAN, STD)
    assert [(block.name, block.attention) for block in model.blocks()] == [(f"stages.{i}", None) for i in range(3)]
    declared = (Blocks("stages.*", "windows"), Blocks("stages.*"))  # the first counts
    model = Classifier(Backbone(network, 2, (3, 4, 4), blocks=declared), MEAN, STD)
    assert {block.attention for block in model.blocks()} == {"windows"}


def test_asking_a_cnn_for_attention_is_an_error() -> None:
    model = _build("timm/resnet18")
    assert len(model.blocks()) == 8
    with pytest.raises(BastionError, match="no attention maps"), model.tap("attention"):
        model(torch.rand(1, 3, 32, 32))


def test_unknown_taps_and_blockless_networks_are_errors(tiny_model: Classifier, vit: Classifier) -> None:
    with pytest.raises(BastionError, match="unknown 'atention'; did you mean 'attention'"), vit.tap("atention"):
        pass
    with pytest.raises(BastionError, match="which of its modules are residual blocks is not known"):
        tiny_model.blocks()


def test_wrong_shapes_and_normalisations_are_errors(vit: Classifier) -> None:
    with pytest.raises(BastionError, match=r"expected \(B, 3, H, W\), got \(2, 1, 32, 32\)"):
        vit(torch.rand(2, 1, 32, 32))
    with pytest.raises(BastionError, match="need 3 means and 3 positive stds"):
        Classifier(Backbone(nn.Identity(), 10, (3, 8, 8)), (0.5,), (0.5,))


def test_logits_are_float32_under_autocast_and_float64_in_double(vit: Classifier) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert vit(torch.rand(1, 3, 32, 32)).dtype == torch.float32
    double = _build("vit/micro", depth=1, embed_dim=16).double()
    assert double(torch.rand(1, 3, 32, 32, dtype=torch.float64)).dtype == torch.float64


def test_resizing_happens_inside_and_before_the_network() -> None:
    model = checkpoint.build(
        {"name": "vit/micro", "img_size": 32}, mean=MEAN, std=STD, shape=(3, 16, 16), resize="bicubic"
    ).eval()
    x = torch.rand(2, 3, 16, 16)
    larger = nn.functional.interpolate(x, (32, 32), mode="bicubic", align_corners=False)
    assert torch.allclose(model(x), model(larger), atol=1e-5)
    assert model.shape == (3, 16, 16)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "timm/vit_tiny_patch16_224",
            (3, 32, 32),
            r"made for images of 224×224 and does not take 32×32 .*set its size",
        ),
        ("vit/micro", (1, 32, 32), "the model takes 3 channels, the data have 1"),
    ],
)
def test_images_that_a_network_cannot_take_are_refused_beforehand(
    name: str, shape: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(BastionError, match=message):
        _build(name).check_input(shape, "here")


def test_networks_that_take_any_size_do() -> None:
    model = _build("timm/resnet10t").train()
    model.network.bn1.eval()
    model.check_input((3, 32, 32), "here")
    assert model.training
    assert not model.network.bn1.training

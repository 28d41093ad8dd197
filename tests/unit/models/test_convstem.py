"""ConvStem models: sizes and costs of Tables 7, 8, 9 and 14 of Singh et al. 2023, names, grids, small images."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bastion import BastionError
from bastion.models import Backbone, Classifier, complexity, models
from bastion.models.meta import meta
from bastion.models.stems import Layer, Stem

VIT_STEM = [[48, 3, 2], [96, 3, 2], [192, 3, 2], [384, 3, 2]]

# Name, stem, parameters, GMACs at 224.
TABLE_14 = [
    ("vit-s", "patch", 22_050_664, 4.60),
    ("vit-s", "conv", 22_777_576, 4.98),
    ("vit-m", "patch", 38_849_512, 7.99),
    ("vit-m", "conv", 39_527_272, 8.36),
    ("vit-b", "patch", 86_567_656, 17.56),
    ("vit-b", "conv", 87_147_112, 17.91),
    ("iso-s", "patch", 22_308_712, 4.29),
    ("iso-s", "conv", 23_035_624, 4.66),
    ("convnext-t", "patch", 28_589_128, 4.46),
    ("convnext-t", "conv", 28_627_432, 4.59),
    ("convnext-s", "patch", 50_223_688, 8.68),
    ("convnext-s", "conv", 50_261_992, 8.82),
    ("convnext-b", "patch", 88_591_464, 15.36),
    ("convnext-b", "conv", 88_753_416, 15.88),
    ("convnext-l", "conv", 198_134_680, None),
]
TABLE_7 = [
    ("convnext-t", [[96, 7, 4]], 28_598_632, 4.485),
    ("convnext-t", [[48, 7, 4], [96, 3, 1]], 28_633_192, 4.593),
    ("convnext-t", [[48, 7, 2], [96, 3, 2]], 28_633_192, 4.660),
    ("convnext-t", [[48, 5, 2], [96, 3, 2]], 28_629_736, 4.616),
    ("convnext-t", [[48, 3, 2], [96, 3, 2]], 28_627_432, 4.587),
]
TABLE_8 = [("convnext-b", [[64, 3, 2], [128, 3, 2]], 88_660_968, 15.59)]
TABLE_9 = [  # the sheet's GMACs have 0.01 for LayerNorm, which is not counted here
    ("vit-s", VIT_STEM, 22_777_576, 4.98),
    ("vit-s", [[48, 3, 2], [48, 3, 2], [48, 3, 2], [384, 3, 2]], 22_113_448, 4.70),
    ("vit-s", [[48, 7, 4], [384, 7, 4]], 22_814_728, 4.77),
    ("vit-s", [[48, 7, 4], [96, 3, 2], [192, 3, 2], [384, 3, 1]], 22_783_336, 4.79),
    ("vit-s", [[48, 7, 4], [96, 7, 4], [192, 3, 1], [384, 3, 1]], 22_967_656, 4.80),
]


def _meta(name: str, **options: Any) -> Backbone:
    """Shapes without numbers."""
    return _built(json.dumps({"name": name, **options}))


@cache
def _built(spec: str) -> Backbone:
    with meta():
        return models.build(json.loads(spec))


@pytest.mark.parametrize(("name", "stem", "parameters", "gmacs"), TABLE_14)
def test_models_have_the_size_and_the_cost_of_the_paper(
    name: str, stem: str, parameters: int, gmacs: float | None
) -> None:
    network = _meta(f"convstem/{name}", stem=stem).network
    assert complexity.parameters(network) == parameters
    if gmacs is not None:
        assert (_body_macs(name) + _macs(_stem(network))) / 1e9 == pytest.approx(gmacs, abs=0.006)


@pytest.mark.parametrize(("name", "layers", "parameters", "gmacs"), TABLE_7 + TABLE_8 + TABLE_9)
def test_designs_have_the_size_and_the_cost_of_the_paper(
    name: str, layers: list[Layer], parameters: int, gmacs: float
) -> None:
    network = _meta(f"convstem/{name}", stem="conv").network
    with meta():
        stem = Stem(layers, 3, 384 if name == "vit-s" else None)
    rest = complexity.parameters(network) - complexity.parameters(_stem(network))
    assert rest + complexity.parameters(stem) == parameters
    assert (_body_macs(name) + _macs(stem)) / 1e9 == pytest.approx(gmacs, abs=0.006)


@pytest.mark.parametrize(
    ("name", "layers", "stem"),
    [
        ("tiny/convstem-vit", [[8, 7, 4], [16, 3, 1]], "patch_embed.proj"),
        ("tiny/convstem-convnext", [[8, 5, 2], [32, 7, 1]], "stem"),
    ],
)
def test_a_design_is_built_as_it_is_written(name: str, layers: list[list[int]], stem: str) -> None:
    built = _meta(name, stem=layers).network.get_submodule(stem).stem
    made = [
        (module.out_channels, *module.kernel_size, *module.stride) for module in built if isinstance(module, nn.Conv2d)
    ]
    expected = [(channels, kernel, kernel, stride, stride) for channels, kernel, stride in layers]
    assert made == expected + ([(96, 1, 1, 1, 1)] if "vit" in name else [])


@cache
def _body_macs(name: str) -> int:
    """Of all behind the stem, which no design changes."""
    with meta():
        model = Classifier(_meta(f"convstem/{name}", stem="conv"), (0.5,) * 3, (0.25,) * 3)
    return complexity.macs(model) - _macs(_stem(model.network))


def _stem(network: Any) -> nn.Module:
    stem: nn.Module = network.patch_embed if hasattr(network, "patch_embed") else network.stem
    return stem


def _macs(stem: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter:
        stem(torch.empty(1, 3, 224, 224, device="meta"))
    return int(counter.get_total_flops()) // 2


@pytest.mark.parametrize(
    ("name", "prefix", "layers"),
    [
        ("vit-s", "patch_embed.proj.stem", (0, 1, 3, 4, 6, 7, 9, 10, 12)),
        ("vit-b", "patch_embed.proj.stem", (0, 1, 3, 4, 6, 7, 9, 10, 12)),
        ("iso-s", "stem.stem", (0, 1, 3, 4, 6, 7, 9, 10, 12)),
        ("convnext-t", "stem.stem", (0, 1, 3, 4)),
        ("convnext-b", "stem.stem", (0, 1, 3, 4, 6, 7)),
    ],
)
def test_stems_have_the_names_of_the_authors_checkpoints(name: str, prefix: str, layers: tuple[int, ...]) -> None:
    names = [each for each in _meta(f"convstem/{name}", stem="conv").network.state_dict() if each.startswith(prefix)]
    assert names == [f"{prefix}.{layer}.{part}" for layer in layers for part in ("weight", "bias")]


@pytest.mark.parametrize(
    ("name", "base", "stem"),
    [
        ("vit-s", "deit_small_patch16_224", "patch_embed"),
        ("vit-m", "deit3_medium_patch16_224", "patch_embed"),
        ("vit-b", "vit_base_patch16_224", "patch_embed"),
        ("convnext-t", "convnext_tiny", "stem"),
    ],
)
def test_all_but_the_stem_is_the_base_model(name: str, base: str, stem: str) -> None:
    shapes = _shapes(_meta(f"timm/{base}").network)
    assert _shapes(_meta(f"convstem/{name}", stem="patch").network) == shapes
    rest = {each: shape for each, shape in shapes.items() if not each.startswith(stem)}
    ours = _shapes(_meta(f"convstem/{name}", stem="conv").network)
    assert {each: shape for each, shape in ours.items() if not each.startswith(stem)} == rest


def _shapes(network: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in network.state_dict().items()}


def test_the_medium_vit_has_layer_scale_and_no_position_for_its_class_token() -> None:
    shapes = {size: _shapes(_meta(f"convstem/vit-{size}", stem="conv").network) for size in "smb"}
    assert [shapes[size]["pos_embed"] for size in "smb"] == [(1, 197, 384), (1, 196, 512), (1, 197, 768)]
    assert [shapes[size].get("blocks.0.ls1.gamma") for size in "smb"] == [None, (512,), None]


def test_a_vit_at_another_size_has_positions_for_it() -> None:
    backbone = _meta("convstem/vit-s", img_size=288)
    assert backbone.network.pos_embed.shape == (1, 1 + 18**2, 384)
    assert backbone.network.patch_embed.grid_size == (18, 18)
    assert backbone.network(torch.empty(1, 3, 288, 288, device="meta")).shape == (1, 1000)


@pytest.mark.parametrize(("size", "parameters"), [("t", 27_866_122), ("b", 87_738_666)])
def test_unstride_3_is_the_papers_change_for_cifar(size: str, parameters: int) -> None:
    backbone = _meta(f"convstem/convnext-{size}", img_size=32, num_classes=10, unstride=3)
    network = backbone.network
    strided = {name for name, module in network.named_modules() if getattr(module, "stride", (1, 1)) != (1, 1)}
    assert strided == {"stages.2.downsample.1", "stages.3.downsample.1"}
    assert complexity.parameters(network) == parameters
    maps = network.stem(torch.empty(1, 3, 32, 32, device="meta"))
    sides = []
    for stage in network.stages:
        maps = stage(maps)
        sides.append(maps.shape[-1])
    assert sides == [32, 31, 15, 7]


@pytest.mark.parametrize("name", ["tiny/convstem-vit", "tiny/convstem-convnext", "tiny/convnext"])
def test_tiny_models_are_small_and_keep_a_grid(name: str) -> None:
    backbone = models.build(name)
    assert complexity.parameters(backbone.network) <= 1_500_000
    assert backbone.shape == (3, 32, 32)
    if "convnext" in name:
        maps = backbone.network.stages(backbone.network.stem(torch.zeros(1, 3, 32, 32)))
        assert maps.shape[2:] == (2, 2)
    else:
        assert backbone.network.patch_embed.grid_size == (8, 8)


def test_tiny_convnexts_differ_in_their_stems_alone() -> None:
    conv, patch = (_shapes(_meta(f"tiny/{name}").network) for name in ("convstem-convnext", "convnext"))
    differ = {name for name in conv.keys() | patch.keys() if conv.get(name) != patch.get(name)}
    assert differ and all(name.startswith("stem.") for name in differ)
    assert _shapes(_meta("tiny/convnext", stem="conv").network) == conv


def test_new_stems_are_random_as_torch_makes_them_and_the_rest_as_timm_does() -> None:
    """The authors put the stem into the finished model."""
    network = models.build("tiny/convstem-convnext").network
    first = network.stem.stem[0]
    assert first.weight.abs().max().item() == pytest.approx((3 * 9) ** -0.5, rel=0.05)
    assert first.bias.any()
    assert not network.stages[1].downsample[1].bias.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "convstem/convnext-t", "stem": [[48, 3, 2], [48, 3, 2]]}, "needs 96 channels here, got 48"),
        ({"name": "convstem/vit-s", "stem": [[48, 4, 2]]}, r"odd kernel, got \[48, 4, 2\]"),
        ({"name": "convstem/vit-s", "stem": []}, "expected one convolution or more"),
        ({"name": "convstem/vit-s", "stem": "convs"}, "model.stem: unknown stem 'convs'; did you mean 'conv'"),
        ({"name": "convstem/vit-s", "stem": [[48, 3]]}, r"model.stem: unknown stem \[\[48, 3\]\]"),
        ({"name": "convstem/vit-s", "img_size": 200}, "200 cannot be cut into patches of 16"),
        ({"name": "convstem/iso-s", "img_size": 200}, "200 cannot be cut into patches of 16"),
        ({"name": "convstem/convnext-t", "img_size": 30}, "30 cannot be cut into patches of 4"),
    ],
)
def test_what_cannot_be_built_says_why(options: dict[str, Any], message: str) -> None:
    with meta(), pytest.raises(BastionError, match=message):
        models.build(options)


def test_images_that_the_stages_halve_away_are_refused() -> None:
    with pytest.raises(BastionError, match="halve the stem's map three times, so it needs 16 pixels or more, got 8"):
        models.build({"name": "tiny/convnext", "img_size": 8})

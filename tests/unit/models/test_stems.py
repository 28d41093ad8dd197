"""Stems: what they compute, which grids they make, and the names and numbers that checkpoints depend on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bastion.models import models
from bastion.models.stems import Layer, Stem, check_patches, total_stride


def test_a_stem_is_convolution_channel_norm_and_gelu_in_turn_and_then_a_linear_map() -> None:
    stem = Stem([(8, 3, 2), (6, 7, 4)], 3, 5)
    x = torch.randn(2, 3, 32, 32)
    maps = x
    for index, stride in ((0, 2), (3, 4)):
        convolution = stem.stem[index]
        maps = F.conv2d(maps, convolution.weight, convolution.bias, stride, padding=convolution.weight.shape[-1] // 2)
        centred = maps - maps.mean(1, keepdim=True)
        maps = F.gelu(centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt())
    expected = torch.einsum("oi,bihw->bohw", stem.stem[6].weight.flatten(1), maps) + stem.stem[6].bias.view(1, -1, 1, 1)
    assert expected.shape == (2, 5, 4, 4)
    assert torch.allclose(stem(x), expected, atol=1e-5)


def test_without_a_width_a_stem_ends_in_its_last_convolution() -> None:
    stem = Stem([(8, 3, 2), (6, 3, 1)], 1)
    assert [name for name, _ in stem.named_parameters() if name.endswith("weight")] == [
        f"stem.{index}.weight" for index in (0, 1, 3, 4)
    ]
    assert stem(torch.zeros(1, 1, 8, 8)).shape == (1, 6, 4, 4)


@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
@pytest.mark.parametrize("stride", [1, 2, 4])
def test_the_grid_is_the_image_over_the_strides(kernel: int, stride: int) -> None:
    layers: list[Layer] = [(4, kernel, stride), (4, 3, 2)]
    assert total_stride(layers) == 2 * stride
    assert Stem(layers, 3)(torch.zeros(1, 3, 32, 32)).shape[2:] == (16 // stride, 16 // stride)


def test_the_stem_of_vit_micro_is_as_its_checkpoints_know_it() -> None:
    torch.manual_seed(0)
    built = models.build({"name": "vit/micro", "stem": [32, 64], "embed_dim": 16, "depth": 1}).network.patch_embed
    torch.manual_seed(0)
    convolutions = {
        0: nn.Conv2d(3, 32, 3, stride=2, padding=1),
        3: nn.Conv2d(32, 64, 3, stride=2, padding=1),
        6: nn.Conv2d(64, 16, 1),
    }
    state = built.state_dict()
    expected = {f"layers.{index}.{part}" for index in (0, 1, 3, 4, 6) for part in ("weight", "bias")}
    assert set(state) == expected
    for index, convolution in convolutions.items():
        assert torch.equal(state[f"layers.{index}.weight"], convolution.weight)
        assert torch.equal(state[f"layers.{index}.bias"], convolution.bias)
    assert [built.layers[index].eps for index in (1, 4)] == [1e-5, 1e-5]
    assert (built.grid_size, built.patch_size, built.num_patches) == ((8, 8), (4, 4), 64)


@pytest.mark.parametrize("layer", [(0, 3, 2), (8, 4, 2), (8, 3, 0), (8, -1, 2)])
def test_layers_that_are_none_say_so(layer: Layer) -> None:
    with pytest.raises(ValueError, match=rf"odd kernel, got \[{layer[0]}, {layer[1]}, {layer[2]}\]"):
        total_stride([(8, 3, 2), layer])


def test_a_stem_needs_a_layer_and_an_image_its_patches() -> None:
    with pytest.raises(ValueError, match="expected one convolution or more, got none"):
        total_stride([])
    for size, patch in ((30, 4), (8, 16), (32, 0), (0, 4)):
        with pytest.raises(ValueError, match=f"img_size: {size} cannot be cut into patches of {patch}"):
            check_patches(size, patch)
    check_patches(28, 4)

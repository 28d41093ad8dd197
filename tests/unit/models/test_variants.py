"""Keys that every model takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bastion import BastionError
from bastion.models import models
from bastion.models.meta import meta


@pytest.mark.parametrize(("name", "kind"), [("relu", nn.ReLU), ("silu", nn.SiLU), ("gelu", nn.GELU)])
@pytest.mark.parametrize(
    "model", ["vit/micro", "resnet/micro", "timm/resnet18", "timm/levit_128s", "timm/mobilenetv3_small_050"]
)
def test_every_activation_is_replaced(model: str, name: str, kind: type[nn.Module]) -> None:
    with meta():
        plain, varied = models.build(model).network, models.build({"name": model, "act_layer": name}).network
    activations = (nn.ReLU, nn.GELU, nn.SiLU, nn.Hardswish)
    places = [key for key, module in plain.named_modules() if isinstance(module, activations)]
    assert places and all(type(varied.get_submodule(key)) is kind for key in places)
    assert plain.state_dict().keys() == varied.state_dict().keys()


def test_the_activation_changes_the_answer() -> None:
    x = torch.randn(2, 3, 32, 32)
    torch.manual_seed(0)
    plain = models.build("vit/micro").network.eval()
    torch.manual_seed(0)
    varied = models.build({"name": "vit/micro", "act_layer": "relu"}).network.eval()
    assert not torch.allclose(plain(x), varied(x))
    block = varied.blocks[0].mlp
    hidden = block.fc1(torch.randn(2, 4, 128))
    assert torch.equal(block.act(hidden), hidden.clamp(min=0))


def test_first_strides_become_one() -> None:
    plain = models.build("timm/resnet18").network.eval()
    finer = models.build({"name": "timm/resnet18", "unstride": 2}).network.eval()
    assert (finer.conv1.stride, finer.maxpool.stride) == ((1, 1), 1)
    assert finer.layer2[0].conv1.stride == (2, 2)
    x = torch.randn(1, 3, 32, 32)
    assert plain.forward_features(x).shape[2:] == (1, 1) and finer.forward_features(x).shape[2:] == (4, 4)


def test_bad_variants_are_told() -> None:
    with pytest.raises(BastionError, match="unstride: VisionTransformer has 1 strided layers, got 2"):
        models.build({"name": "vit/micro", "unstride": 2})
    with pytest.raises(BastionError, match="model.act_layer: unknown act_layer 'tanh'; known: gelu, relu, silu"):
        models.build({"name": "vit/micro", "act_layer": "tanh"})
    with pytest.raises(BastionError, match="model.unstrid: unknown key; did you mean 'unstride'"):
        models.build({"name": "vit/micro", "unstrid": 1})


@pytest.mark.parametrize(("name", "count"), [("vit/micro", 1), ("resnet/micro", 1), ("tiny/cct", 2), ("tiny/rvt", 1)])
def test_a_stride_that_the_rest_depends_on_is_told(name: str, count: int) -> None:
    with pytest.raises(BastionError, match=f"unstride: {count} does not go with the other layers of"):
        models.build({"name": name, "unstride": count})


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "timm/resnet18", "num_classes": 0},
        {"name": "resnet/micro", "img_size": 0},
        {"name": "tiny/cct", "img_size": -32},
    ],
)
def test_sizes_are_positive(spec: dict[str, Any]) -> None:
    with pytest.raises(BastionError, match="num_classes, in_chans and img_size must be 1 or more, got"):
        models.build(spec)

"""Options that every model takes: another activation function, and smaller strides for small images."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from bastion.forward import in_mode
from bastion.models.classifier import Backbone

Activation = Literal["gelu", "relu", "silu"]

_MADE: dict[Activation, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU}
# By class name, as timm has its own version of most. Sigmoid, Hardsigmoid and Tanh are gates, and not replaced.
_ACTIVATIONS = {
    *("ReLU", "ReLU6", "LeakyReLU", "GELU", "GELUTanh", "QuickGELU", "SiLU", "Swish", "Mish", "ELU", "CELU", "SELU"),
    *("Hardswish", "HardSwish", "HardSwishMe", "SwishMe", "MishMe", "HardMish", "HardMishMe", "PReLU", "StarReLU"),
}
_STRIDED = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)


def apply_variants(backbone: Backbone, /, *, act_layer: Activation | None = None, unstride: int = 0) -> Backbone:
    """Apply the options to what a family has built.

    `act_layer` replaces every activation. `unstride: n` sets the stride of the first n strided convolutions or poolings
    to 1, so that weights trained on large images can be used on small ones.
    """
    if min(backbone.num_classes, *backbone.shape) < 1:
        raise ValueError(
            f"num_classes, in_chans and img_size must be 1 or more, got {backbone.num_classes} and {backbone.shape}"
        )
    if act_layer is not None:
        _activate(backbone.network, act_layer)
    if unstride:
        _unstride(backbone.network, unstride)
        _check_runs(backbone, f"unstride: {unstride}")
    return backbone


def _activate(network: nn.Module, name: Activation) -> None:
    places = [
        (module, key)
        for module in network.modules()
        for key, child in module.named_children()
        if type(child).__name__ in _ACTIVATIONS
    ]
    if not places:
        raise ValueError(f"act_layer: {type(network).__name__} has no activation modules to replace by {name}")
    for module, key in places:
        setattr(module, key, _MADE[name]())


def _unstride(network: nn.Module, count: int) -> None:
    strided = [
        module for module in network.modules() if isinstance(module, _STRIDED) and _sides(module.stride) != (1, 1)
    ]
    if not 0 <= count <= len(strided):
        raise ValueError(f"unstride: {type(network).__name__} has {len(strided)} strided layers, got {count}")
    for module in strided[:count]:
        module.stride = 1 if isinstance(module.stride, int) else (1, 1)


def _check_runs(backbone: Backbone, why: str) -> None:
    """Some networks do not run with other strides: the number of tokens may be fixed, or a skip no longer fit."""
    network = backbone.network
    image = torch.zeros(1, *backbone.shape, device=next(network.parameters()).device)
    try:
        with torch.no_grad(), in_mode(network, training=False):
            network(image)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ValueError(f"{why} does not go with the other layers of {type(network).__name__} ({error})") from error


def _sides(stride: int | tuple[int, ...]) -> tuple[int, ...]:
    return (stride, stride) if isinstance(stride, int) else tuple(stride)

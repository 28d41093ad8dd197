"""Wide ResNets (Zagoruyko and Komodakis 2016): pre-activation ResNets of three stages, wide rather than deep."""

from __future__ import annotations

from functools import partial

from torch import nn

from bastion.models import models
from bastion.models.classifier import Backbone
from bastion.models.preact import RENAMES, PreActBlock, PreActResNet

PAPER = "Zagoruyko and Komodakis 2016, Wide residual networks"


def _wide(
    depth: int, widen: int, num_classes: int, in_chans: int, img_size: int, drop_rate: float, *, bias: bool = False
) -> Backbone:
    """WRN-depth-widen: two convolutions a block, three stages, and four layers besides."""
    widths = (16 * widen, 32 * widen, 64 * widen)
    network = PreActResNet(
        widths,
        ((depth - 4) // 6,) * 3,
        num_classes,
        in_chans,
        stem_width=16,
        stem_bias=bias,
        block=partial(PreActBlock, bias=bias, drop_rate=drop_rate),
    )
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return Backbone(network, num_classes, (in_chans, img_size, img_size), paper=PAPER, renames=RENAMES)


@models.register("cifar/wrn")
def cifar_wrn(*, num_classes: int = 10, in_chans: int = 3, img_size: int = 32, drop_rate: float = 0.5) -> Backbone:
    """WRN-40-10 for 32×32 images, 55.9 M parameters: convolutions with bias, dropout in the blocks."""
    return _wide(40, 10, num_classes, in_chans, img_size, drop_rate, bias=True)


@models.register("cifar/wrn-28-10")
def cifar_wrn_28_10(
    *, num_classes: int = 10, in_chans: int = 3, img_size: int = 32, drop_rate: float = 0.0
) -> Backbone:
    """WRN-28-10 for 32×32 images, 36.5 M parameters."""
    return _wide(28, 10, num_classes, in_chans, img_size, drop_rate)


@models.register("cifar/wrn-34-10")
def cifar_wrn_34_10(
    *, num_classes: int = 10, in_chans: int = 3, img_size: int = 32, drop_rate: float = 0.0
) -> Backbone:
    """WRN-34-10 for 32×32 images, 46.2 M parameters."""
    return _wide(34, 10, num_classes, in_chans, img_size, drop_rate)

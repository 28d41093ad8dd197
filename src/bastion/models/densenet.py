"""DenseNet-BC (Huang et al. 2017) for small images: timm's class, with a stem of stride 1."""

from __future__ import annotations

from typing import Any

from timm.models.densenet import DenseNet
from torch import nn

from bastion.models.classifier import Blocks
from bastion.models.family import Size, family


@family(
    {
        "cifar/densenet": Size(
            "DenseNet-BC for 32×32 images, growth 12, 1.0 M parameters; the 1.12 M of Tang et al. fit no standard one."
        )
    },
    paper="Huang et al. 2017, Densely connected convolutional networks",
    category="CNN",
    blocks=(Blocks("features.denseblock*"),),
)
def densenet(*, num_classes: int = 10, in_chans: int = 3, img_size: int = 32) -> Any:
    if img_size < 8:
        raise ValueError(f"img_size: three poolings halve the image, so it needs 8 pixels or more, got {img_size}")
    network = DenseNet(growth_rate=12, block_config=(6, 12, 24, 16), num_classes=num_classes, in_chans=in_chans)
    stem = network.features
    stem.conv0 = nn.Conv2d(in_chans, stem.conv0.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.conv0.weight)  # as timm's are
    stem.norm0 = nn.Identity()  # each dense layer begins with a norm of its own
    stem.pool0 = nn.Identity()
    return network

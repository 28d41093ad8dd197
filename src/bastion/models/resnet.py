"""ResNets (He et al. 2016) and ResNeXts (Xie et al. 2017) for small images: timm's classes, with a stem of stride 1."""

from __future__ import annotations

from typing import Any

from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn

from bastion.models.classifier import Blocks
from bastion.models.family import Size, family

# Names in the CIFAR code with which most robust ResNets were published.
RENAMES = ((r"(layer.*\.)shortcut\.(.*)", r"\1downsample.\2"), (r"linear\.(.*)", r"fc.\1"))
BLOCKS = (Blocks("layer*.*"),)


class ResNeXtBottleneck(Bottleneck):  # type: ignore[misc]  # timm is untyped
    """With an expansion of 2 instead of 4."""

    expansion = 2


def small_images(network: Any, kernel: int = 3) -> Any:
    """Give a ResNet a stem of stride 1 without pooling."""
    in_chs, out_chs = network.conv1.in_channels, network.conv1.out_channels
    network.conv1 = nn.Conv2d(in_chs, out_chs, kernel, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")  # as timm's are
    network.maxpool = nn.Identity()
    return network


@family(
    {
        "cifar/resnet": Size(
            "ResNet-50 for 32×32 images, 23.5 M parameters: a 3×3 stem of stride 1, no pooling behind it.",
            *(Bottleneck, (3, 4, 6, 3)),
        ),
        "cifar/resnet18": Size(
            "ResNet-18 for 32×32 images, 11.2 M parameters: a 3×3 stem of stride 1, no pooling behind it.",
            *(BasicBlock, (2, 2, 2, 2)),
        ),
    },
    paper="He et al. 2016, Deep residual learning",
    category="CNN",
    blocks=BLOCKS,
    renames=RENAMES,
)
def resnet(block: Any, depths: tuple[int, ...], *, num_classes: int = 10, in_chans: int = 3, img_size: int = 32) -> Any:
    return small_images(ResNet(block, depths, num_classes, in_chans))


@family(
    {"cifar/resnext": Size("ResNeXt-29 2×64d for 32×32 images, 9.1 M parameters, with a 1×1 stem.")},
    paper="Xie et al. 2017, Aggregated residual transformations",
    category="CNN",
    blocks=BLOCKS,
)
def resnext(*, num_classes: int = 10, in_chans: int = 3, img_size: int = 32) -> Any:
    network = ResNet(
        ResNeXtBottleneck,
        (3, 3, 3),
        num_classes,
        in_chans,
        channels=(128, 256, 512),
        cardinality=2,
        base_width=32,  # width of a group at 64 channels
    )
    network.layer4 = nn.Identity()  # timm's forward pass expects four stages
    return small_images(network, kernel=1)

"""ResNets (He et al. 2016) and ResNeXts (Xie et al. 2017) for small images: timm's, with a stem of stride 1."""

from __future__ import annotations

from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn

from bastion.models import models
from bastion.models.classifier import Backbone

# The names of the CIFAR code that most robust ResNets were published with.
RENAMES = ((r"(layer.*\.)shortcut\.(.*)", r"\1downsample.\2"), (r"linear\.(.*)", r"fc.\1"))
PAPER = "He et al. 2016, Deep residual learning"
RESNEXT = "Xie et al. 2017, Aggregated residual transformations"


class ResNeXtBottleneck(Bottleneck):  # type: ignore[misc]  # timm is untyped
    """Twice, not four times, as wide at its end."""

    expansion = 2


def small_images(network: ResNet, kernel: int = 3) -> ResNet:
    """A ResNet whose stem keeps the size of the image."""
    before, after = network.conv1.in_channels, network.conv1.out_channels
    network.conv1 = nn.Conv2d(before, after, kernel, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")  # as timm's are
    network.maxpool = nn.Identity()
    return network


@models.register("cifar/resnet")
def cifar_resnet(*, num_classes: int = 10, in_chans: int = 3, img_size: int = 32) -> Backbone:
    """ResNet-50 for 32×32 images, 23.5 M parameters: a 3×3 stem of stride 1, no pooling behind it."""
    network = small_images(ResNet(Bottleneck, (3, 4, 6, 3), num_classes, in_chans))
    return Backbone(network, num_classes, (in_chans, img_size, img_size), paper=PAPER, renames=RENAMES)


@models.register("cifar/resnet18")
def cifar_resnet18(*, num_classes: int = 10, in_chans: int = 3, img_size: int = 32) -> Backbone:
    """ResNet-18 for 32×32 images, 11.2 M parameters: a 3×3 stem of stride 1, no pooling behind it."""
    network = small_images(ResNet(BasicBlock, (2, 2, 2, 2), num_classes, in_chans))
    return Backbone(network, num_classes, (in_chans, img_size, img_size), paper=PAPER, renames=RENAMES)


@models.register("cifar/resnext")
def cifar_resnext(*, num_classes: int = 10, in_chans: int = 3, img_size: int = 32) -> Backbone:
    """ResNeXt-29 2×64d for 32×32 images, 9.1 M parameters, with a 1×1 stem."""
    network = ResNet(
        ResNeXtBottleneck,
        (3, 3, 3),
        num_classes,
        in_chans,
        channels=(128, 256, 512),
        cardinality=2,
        base_width=32,  # of a group, for 64 channels
    )
    network.layer4 = nn.Identity()  # timm's forward pass has four stages
    return Backbone(small_images(network, kernel=1), num_classes, (in_chans, img_size, img_size), paper=RESNEXT)

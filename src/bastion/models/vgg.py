"""VGG (Simonyan and Zisserman 2015) with BatchNorm, for small images."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from bastion.models.classifier import Blocks
from bastion.models.family import Size, family


class VGGBlock(nn.Sequential):
    """The convolutions between two poolings, each with BN and ReLU."""

    def __init__(self, in_chs: int, width: int, depth: int) -> None:
        layers: list[nn.Module] = []
        for index in range(depth):
            conv = nn.Conv2d(width if index else in_chs, width, 3, padding=1)
            layers += [conv, nn.BatchNorm2d(width), nn.ReLU()]
        super().__init__(*layers)


@family(
    {"cifar/vgg": Size("VGG-16 with BatchNorm for 32×32 images, 14.7 M parameters; one linear layer is its head.")},
    paper="Simonyan and Zisserman 2015, Very deep convolutional networks",
    category="CNN",
    blocks=(Blocks("stages.*", having="0"),),
)
class VGG(nn.Module):
    def __init__(self, *, num_classes: int = 10, in_chans: int = 3, img_size: int = 32) -> None:
        super().__init__()
        if img_size < 32:
            raise ValueError(f"img_size: five poolings halve the image, so it needs 32 pixels or more, got {img_size}")
        widths, depths = (64, 128, 256, 512, 512), (2, 2, 3, 3, 3)
        stages: list[nn.Module] = []
        for (in_chs, width), depth in zip(pairwise((in_chans, *widths)), depths, strict=True):
            stages += [VGGBlock(in_chs, width, depth), nn.MaxPool2d(2)]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stages(x).mean(dim=(2, 3)))
        return logits

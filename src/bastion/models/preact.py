"""Pre-activation ResNets (He et al. 2016, Identity mappings) for small images, with BatchNorm."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from bastion.models import models
from bastion.models.classifier import Backbone


class PreActBlock(nn.Module):
    """BN, ReLU, 3×3 convolution, twice, around a skip that sees the first activation where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        changes = stride != 1 or before != after
        self.skip = nn.Conv2d(before, after, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        branch: Tensor = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return branch + (x if self.skip is None else self.skip(active))


class PreActResNet(nn.Module):
    def __init__(
        self, widths: tuple[int, ...], depths: tuple[int, ...], num_classes: int, in_chans: int, stem_stride: int
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_chans, widths[0], 3, stem_stride, padding=1, bias=False)
        stages = []
        for stage, ((before, after), depth) in enumerate(zip(pairwise((widths[0], *widths)), depths, strict=True)):
            first = PreActBlock(before, after, stride=1 if stage == 0 else 2)
            stages.append(nn.Sequential(first, *(PreActBlock(after, after, 1) for _ in range(depth - 1))))
        self.stages = nn.Sequential(*stages)
        self.norm = nn.BatchNorm2d(widths[-1])
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stages(self.stem(x))))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


@models.register("resnet/micro")
def resnet_micro(
    *,
    num_classes: int = 10,
    in_chans: int = 3,
    img_size: int = 32,
    widths: tuple[int, ...] = (32, 64, 128),
    depths: tuple[int, ...] = (2, 2, 2),
    stem_stride: int = 1,
) -> Backbone:
    """Pre-activation ResNet with BatchNorm for 32×32 images, 0.7 M parameters."""
    if len(widths) != len(depths) or not widths:
        raise ValueError(f"widths and depths must name as many stages each, got {widths} and {depths}")
    network = PreActResNet(widths, depths, num_classes, in_chans, stem_stride)
    return Backbone(network, num_classes, (in_chans, img_size, img_size))

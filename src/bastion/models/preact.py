"""Pre-activation ResNets (He et al. 2016, Identity mappings) for small images, with BatchNorm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from bastion.models.classifier import Blocks
from bastion.models.family import Size, family

PAPER = "He et al. 2016, Identity mappings in deep residual networks"
BLOCKS = (Blocks("stages.*.*"),)
# Names in the CIFAR code with which most robust ResNets and WideResNets were published.
RENAMES = (
    (r"conv1\.(.*)", r"stem.\1"),
    (r"(?:layer|block)(\d)\.(?:layer\.)?(.*)", lambda name: f"stages.{int(name[1]) - 1}.{name[2]}"),
    (r"(stages\..*\.)bn(\d\..*)", r"\1norm\2"),
    (r"(stages\..*\.)(?:shortcut\.0|shortcut|convShortcut)\.(.*)", r"\1skip.\2"),
    (r"bn1?\.(.*)", r"norm.\1"),
    (r"(?:linear|fc)\.(.*)", r"head.\1"),
)


class PreActBlock(nn.Module):
    """BN, ReLU, 3×3 convolution, twice; where the shape changes, the skip is a 1×1 convolution of the first ReLU."""

    def __init__(self, in_chs: int, width: int, stride: int, *, bias: bool = False, drop_rate: float = 0.0) -> None:
        super().__init__()
        self.width = width  # channels of the output
        self.norm1 = nn.BatchNorm2d(in_chs)
        self.act1 = nn.ReLU()
        self.conv1 = nn.Conv2d(in_chs, width, 3, stride, padding=1, bias=bias)
        self.norm2 = nn.BatchNorm2d(width)
        self.act2 = nn.ReLU()
        self.drop = nn.Dropout(drop_rate) if drop_rate else nn.Identity()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=bias)
        changes = stride != 1 or in_chs != width
        self.skip = nn.Conv2d(in_chs, width, 1, stride, bias=bias) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        active = self.act1(self.norm1(x))
        branch: Tensor = self.conv2(self.drop(self.act2(self.norm2(self.conv1(active)))))
        return branch + (x if self.skip is None else self.skip(active))


class PreActBottleneck(nn.Module):
    """As `PreActBlock`, with 1×1, 3×3 and 1×1 convolutions; the output has 4 · width channels."""

    def __init__(self, in_chs: int, width: int, stride: int) -> None:
        super().__init__()
        self.width = 4 * width
        self.norm1 = nn.BatchNorm2d(in_chs)
        self.act1 = nn.ReLU()
        self.conv1 = nn.Conv2d(in_chs, width, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.act2 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(width)
        self.act3 = nn.ReLU()
        self.conv3 = nn.Conv2d(width, self.width, 1, bias=False)
        changes = stride != 1 or in_chs != self.width
        self.skip = nn.Conv2d(in_chs, self.width, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        active = self.act1(self.norm1(x))
        branch: Tensor = self.act2(self.norm2(self.conv1(active)))
        branch = self.conv3(self.act3(self.norm3(self.conv2(branch))))
        return branch + (x if self.skip is None else self.skip(active))


class PreActResNet(nn.Module):
    """A 3×3 stem, stages of blocks (all but the first halve the feature map), mean pooling and a linear head."""

    def __init__(
        self,
        widths: tuple[int, ...],
        depths: tuple[int, ...],
        num_classes: int,
        in_chans: int,
        stem_stride: int = 1,
        *,
        stem_width: int | None = None,
        stem_bias: bool = False,
        block: Callable[[int, int, int], PreActBlock | PreActBottleneck] = PreActBlock,
        final_norm: bool = True,
    ) -> None:
        """`final_norm` False leaves out BN and ReLU after the last block, as much code for CIFAR does."""
        super().__init__()
        in_chs = stem_width or widths[0]
        self.stem = nn.Conv2d(in_chans, in_chs, 3, stem_stride, padding=1, bias=stem_bias)
        stages = []
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            blocks: list[nn.Module] = []
            for index in range(depth):
                made = block(in_chs, width, 2 if stage and not index else 1)
                blocks.append(made)
                in_chs = made.width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.norm = nn.BatchNorm2d(in_chs) if final_norm else nn.Identity()
        self.act = nn.ReLU() if final_norm else nn.Identity()
        self.head = nn.Linear(in_chs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.stages(self.stem(x))))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


preact = partial(family, paper=PAPER, category="CNN", blocks=BLOCKS, renames=RENAMES)


@preact({"resnet/micro": Size("Pre-activation ResNet with BatchNorm for 32×32 images, 0.7 M parameters.")})
def resnet_micro(
    *,
    num_classes: int = 10,
    in_chans: int = 3,
    img_size: int = 32,
    widths: tuple[int, ...] = (32, 64, 128),
    depths: tuple[int, ...] = (2, 2, 2),
    stem_stride: int = 1,
) -> nn.Module:
    if len(widths) != len(depths) or not widths:
        raise ValueError(f"widths and depths must name as many stages each, got {widths} and {depths}")
    return PreActResNet(widths, depths, num_classes, in_chans, stem_stride)


@preact(
    {
        "cifar/preact-resnet": Size(
            "Pre-activation ResNet-50 for 32×32 images, 23.5 M parameters, without BatchNorm before the head.",
            *((3, 4, 6, 3), PreActBottleneck),
        ),
        "cifar/preact-resnet18": Size(
            "Pre-activation ResNet-18 for 32×32 images, 11.2 M parameters, without BatchNorm before the head.",
            *((2, 2, 2, 2), PreActBlock),
        ),
    }
)
def preact_resnet(
    depths: tuple[int, ...],
    block: type[PreActBlock | PreActBottleneck],
    *,
    num_classes: int = 10,
    in_chans: int = 3,
    img_size: int = 32,
) -> nn.Module:
    return PreActResNet((64, 128, 256, 512), depths, num_classes, in_chans, block=block, final_norm=False)

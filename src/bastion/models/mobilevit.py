"""MobileViT (Mehta and Rastegari 2022): MobileNetV2 blocks, and transformers between patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from timm.layers import Attention, Mlp
from torch import Tensor, nn

from bastion.models.classifier import Blocks
from bastion.models.family import Size, family

Stride = Literal[8, 16, 32]


class MV2Block(nn.Module):
    """MobileNetV2's inverted residual block; a skip connection where the shape is unchanged."""

    def __init__(self, in_chs: int, out_chs: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = expansion * in_chs
        self.conv = nn.Sequential(
            _conv(in_chs, wide, 1),
            _conv(wide, wide, 3, stride, groups=wide),
            nn.Conv2d(wide, out_chs, 1, bias=False),
            nn.BatchNorm2d(out_chs),
        )
        self.skips = stride == 1 and in_chs == out_chs

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.conv(x)
        return x + branch if self.skips else branch


class TransformerLayer(nn.Module):
    """Pre-norm attention of 4 heads with 8 channels each, and an MLP."""

    def __init__(self, dim: int, mlp_ratio: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, 4, attn_head_dim=8, qkv_bias=False)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, mlp_ratio * dim, act_layer=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        branch: Tensor = self.mlp(self.norm2(x))
        return x + branch


class MobileViTBlock(nn.Module):
    """Convolutions, a transformer between the pixels with the same position in their 2×2 patches, and their fusion."""

    def __init__(self, channels: int, dim: int, depth: int, mlp_ratio: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels, channels, 3)
        self.conv2 = _conv(channels, dim, 1)
        self.transformer = nn.Sequential(*(TransformerLayer(dim, mlp_ratio) for _ in range(depth)))
        self.conv3 = _conv(dim, channels, 1)
        self.conv4 = _conv(2 * channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        local = self.conv2(self.conv1(x))
        mixed = _merge(self.transformer(_split(local)), local.shape)
        fused: Tensor = self.conv4(torch.cat([self.conv3(mixed), x], dim=1))
        return fused


def _split(x: Tensor) -> Tensor:
    """(B, d, H, W) to (4 B, H W / 4, d): a sequence of patches for each of the four positions in a 2×2 patch."""
    batch, dim, height, width = x.shape
    patched = x.reshape(batch, dim, height // 2, 2, width // 2, 2)
    return patched.permute(0, 3, 5, 2, 4, 1).reshape(4 * batch, height * width // 4, dim)


def _merge(tokens: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `_split`."""
    batch, dim, height, width = shape
    patched = tokens.view(batch, 2, 2, height // 2, width // 2, dim)
    return patched.permute(0, 5, 3, 1, 4, 2).reshape(shape)


def _conv(in_chs: int, out_chs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(in_chs, out_chs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_chs), nn.SiLU())


@dataclass(frozen=True)
class Widths:
    """Channels of the layers of a MobileViT."""

    stem: tuple[int, int, int]  # the first convolution, and the MV2 blocks before the transformers
    stages: tuple[int, int, int]
    dims: tuple[int, int, int]  # widths of the transformers
    last: int  # the last convolution
    expansion: int  # of the MV2 blocks, a factor


@family(
    {
        "cifar/mobilevit": Size(
            "MobileViT-S for CIFAR-10, 5.0 M parameters.",
            Widths((16, 32, 64), (96, 128, 160), (144, 192, 240), 640, expansion=4),
        ),
        "tiny/mobilevit": Size(
            "MobileViT-XXS, small enough for two cores, 1.0 M parameters; `stride` as in `cifar/mobilevit`.",
            Widths((16, 16, 24), (48, 64, 80), (64, 80, 96), 320, expansion=2),
        ),
    },
    paper="Mehta and Rastegari 2022, MobileViT",
    category="hybrid",
    blocks=(Blocks("stem.*"), Blocks("trunk.*", "windows", having="transformer"), Blocks("trunk.*")),
)
class MobileViT(nn.Module):
    """`stride` is that of the last feature map: 32 in the paper, which needs image sizes that are multiples of 64.

    By default it is 8 (transformers on maps of 16, 8, 4 at 32 pixels), and 16 above 64 pixels (56, 28, 14 at 224).
    """

    def __init__(
        self,
        widths: Widths,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: int = 32,
        stride: Stride | None = None,
    ) -> None:
        super().__init__()
        total = stride or (8 if img_size <= 64 else 16)
        if img_size % (2 * total):
            raise ValueError(
                f"img_size must be a multiple of {2 * total}, as the last map, of stride {total}, is cut into patches "
                f"of 2×2; got {img_size}"
            )
        strides = {8: (1, 1), 16: (2, 1), 32: (2, 2)}[total]
        first, second, third = widths.stem
        self.conv1 = _conv(in_chans, first, 3, strides[0])
        self.stem = nn.Sequential(
            MV2Block(first, second, 1, widths.expansion),
            MV2Block(second, third, strides[1], widths.expansion),
            MV2Block(third, third, 1, widths.expansion),
            MV2Block(third, third, 1, widths.expansion),
        )
        stages: list[nn.Module] = []
        in_chs = third
        for channels, dim, depth, ratio in zip(widths.stages, widths.dims, (2, 4, 3), (2, 4, 4), strict=True):
            stages += [MV2Block(in_chs, channels, 2, widths.expansion), MobileViTBlock(channels, dim, depth, ratio)]
            in_chs = channels
        self.trunk = nn.Sequential(*stages)
        self.conv2 = _conv(in_chs, widths.last, 1)
        self.head = nn.Linear(widths.last, num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.trunk(self.stem(self.conv1(x))))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits

"""BoTNet (Srinivas et al. 2021) for small images: a ResNet with self-attention in the last stage."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.models.resnet import Bottleneck, ResNet
from torch import Tensor, nn

from bastion.models.classifier import Blocks
from bastion.models.family import Size, family
from bastion.models.resnet import small_images


class MHSA(nn.Module):
    """Self-attention on a feature map, logits q·(k + r) with r the sum of a row and a column embedding; no 1/√d."""

    def __init__(self, width: int, side: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Conv2d(width, width, 1)
        self.key = nn.Conv2d(width, width, 1)
        self.value = nn.Conv2d(width, width, 1)
        self.rel_h = nn.Parameter(torch.randn(heads, width // heads, side, 1))
        self.rel_w = nn.Parameter(torch.randn(heads, width // heads, 1, side))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._tokens(project(x)) for project in (self.query, self.key, self.value))
        place = (self.rel_h + self.rel_w).flatten(2).transpose(1, 2)  # (heads, N, d)
        mixed = F.scaled_dot_product_attention(q, k + place, v, scale=1.0)
        return mixed.transpose(2, 3).reshape(x.shape)

    def _tokens(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], self.heads, -1, x.shape[2] * x.shape[3]).transpose(2, 3)  # (B, heads, N, d)


@family(
    {
        "cifar/botnet": Size(
            "BoTNet-50 for 32×32 images, 18.8 M parameters; the last of its four stages attends, on 8×8, then 4×4.",
            *((64, 128, 256, 512), (3, 4, 6, 3)),
            drop_rate=0.3,
        ),
        "tiny/botnet": Size("BoTNet of 0.7 M parameters for 32×32 images.", (16, 32, 64, 128), (1, 1, 2, 2)),
    },
    paper="Srinivas et al. 2021, Bottleneck transformers",
    category="hybrid",
    blocks=(Blocks("layer4.*", "tokens"), Blocks("layer*.*")),
)
class BoTNet(ResNet):  # type: ignore[misc]  # timm is untyped
    def __init__(
        self,
        channels: tuple[int, ...],
        depths: tuple[int, ...],
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: int = 32,
        drop_rate: float = 0.0,
    ) -> None:
        if img_size < 8 or img_size % 8:
            raise ValueError(f"img_size: three stages halve the map, so it must be a multiple of 8, got {img_size}")
        super().__init__(Bottleneck, depths, num_classes, in_chans, channels=channels, drop_rate=drop_rate)
        small_images(self)
        side = img_size // 4  # of the feature map that enters the last stage
        for block in self.modules():
            if isinstance(block, Bottleneck) and block.downsample is not None:
                plain = block.downsample[0]
                block.downsample[0] = nn.Conv2d(plain.in_channels, plain.out_channels, 1, plain.stride)  # with bias
        for index, block in enumerate(self.layer4):
            attention = MHSA(channels[-1], side // 2 if index else side)
            block.conv2 = attention if index else nn.Sequential(attention, nn.AvgPool2d(2))

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith(("rel_h", "rel_w"))}

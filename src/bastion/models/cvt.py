"""CvT (Wu et al. 2021): three stages of attention, with convolutional token embeddings and projections to q, k, v."""

from __future__ import annotations

from collections import OrderedDict

import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn

from bastion.models.classifier import Blocks
from bastion.models.family import Size, family
from bastion.models.stems import ChannelNorm


class ConvAttention(nn.Module):
    """Attention with a depthwise 3×3 convolution before each projection; keys and values are taken at stride 2."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = _projection(dim, dim, stride=1)
        self.kv = _projection(dim, 2 * dim, stride=2)
        self.proj = nn.Conv2d(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.flatten(2).unflatten(1, (self.num_heads, -1)).transpose(2, 3)  # (B, heads, N or N / 4, d / heads)
            for each in (self.q(x), *self.kv(x).chunk(2, dim=1))
        )
        attended = F.scaled_dot_product_attention(q, k, v).transpose(2, 3)  # (B, heads, d / heads, N)
        projected: Tensor = self.proj(attended.reshape(x.shape))
        return projected


def _projection(in_chs: int, out_chs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_chs, in_chs, 3, stride, padding=1, groups=in_chs, bias=False),
        nn.BatchNorm2d(in_chs),
        nn.Conv2d(in_chs, out_chs, 1, bias=False),
    )


class CvTBlock(nn.Module):
    """A pre-norm transformer block on a feature map (B, d, H, W)."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = ChannelNorm(dim)
        self.attn = ConvAttention(dim, num_heads)
        self.norm2 = ChannelNorm(dim)
        self.mlp = Mlp(dim, 4 * dim, use_conv=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        branch: Tensor = self.mlp(self.norm2(x))
        return x + branch


@family(
    {
        "cifar/cvt": Size(
            "CvT-13 for CIFAR-10, 19.5 M parameters: 64, 192 and 384 wide, 1, 2 and 10 deep.",
            *((64, 192, 384), (1, 2, 10), (1, 3, 6)),
        ),
        "tiny/cvt": Size(
            "CvT small enough for two cores, 1.0 M parameters: 32, 64 and 128 wide, 1, 2 and 4 deep.",
            *((32, 64, 128), (1, 2, 4), (1, 2, 4)),
        ),
    },
    paper="Wu et al. 2021, CvT: Introducing convolutions to vision transformers",
    category="hybrid",
    blocks=(Blocks("stages.*.blocks.*", "tokens"),),
)
class CvT(nn.Module):
    """`patch_size` is the stride of the first embedding.

    By default it is 2 (feature maps of 16, 8, 4 at 32 pixels), and the paper's 4 above 64 pixels (56, 28, 14 at 224).
    """

    def __init__(
        self,
        dims: tuple[int, ...],
        depths: tuple[int, ...],
        heads: tuple[int, ...],
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: int = 32,
        patch_size: int | None = None,
    ) -> None:
        super().__init__()
        stride = (2 if img_size <= 64 else 4) if patch_size is None else patch_size
        if stride < 1 or img_size % (4 * stride):
            raise ValueError(f"img_size must be a multiple of 4 · patch_size, got {img_size} and {stride}")
        stages = []
        in_chs, strides = in_chans, (stride, 2, 2)
        for dim, depth, num_heads, step in zip(dims, depths, heads, strides, strict=True):
            kernel = max(3, 2 * step - 1)  # patches overlap: 7 for the paper's stride of 4, 3 for 2
            embed = nn.Sequential(nn.Conv2d(in_chs, dim, kernel, step, kernel // 2), ChannelNorm(dim))
            blocks = nn.Sequential(*(CvTBlock(dim, num_heads) for _ in range(depth)))
            stages.append(nn.Sequential(OrderedDict(embed=embed, blocks=blocks)))
            in_chs = dim
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(dims[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stages(x).mean(dim=(2, 3)))
        return logits

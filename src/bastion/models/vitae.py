"""ViTAE (Xu et al. 2021) for small images: attention in parallel with convolutions, patches at several dilations.

After the authors' first release.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from timm.layers import Attention, DropPath, Mlp
from torch import Tensor, nn

from bastion.models.classifier import Blocks
from bastion.models.family import Size, family
from bastion.models.initial import truncated_linear
from bastion.models.stems import as_tokens

EPS = 1e-6  # of LayerNorm


@dataclass(frozen=True)
class Reduction:
    """Settings of a reduction cell."""

    embed: int  # channels of each dilated convolution
    tokens: int  # channels of the output
    kernel: int
    ratio: int  # by which the feature map shrinks
    dilations: int  # dilations are 1 to this


@dataclass(frozen=True)
class Cells:
    reductions: tuple[Reduction, ...]  # the last one has no attention
    depth: int  # number of normal cells
    heads: int
    groups: int  # of the convolutions in normal cells
    mlp_ratio: int = 3


class PRM(nn.Module):
    """Pyramid reduction module: convolutions of increasing dilation in parallel, concatenated."""

    def __init__(self, in_chs: int, cell: Reduction) -> None:
        super().__init__()
        self.convs = nn.ModuleList()
        for dilation in range(1, cell.dilations + 1):
            padding = math.ceil(((cell.kernel - 1) * dilation + 1 - cell.ratio) / 2)
            conv = nn.Conv2d(in_chs, cell.embed, cell.kernel, cell.ratio, padding, dilation)
            self.convs.append(nn.Sequential(conv, nn.GELU()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([conv(x) for conv in self.convs], 1)


class Performer(nn.Module):
    """Attention in linear time: exp(q·k) as a product of positive random features (Choromanski et al. 2021)."""

    w: Tensor  # (m, d) orthogonal, not trained

    def __init__(self, in_chs: int, width: int) -> None:
        super().__init__()
        features = width // 2
        self.kqv = nn.Linear(in_chs, 3 * width)
        self.proj = nn.Linear(width, width)
        self.register_buffer("w", nn.init.orthogonal_(torch.empty(features, width), gain=math.sqrt(features)))

    def forward(self, x: Tensor) -> Tensor:
        k, q, v = self.kqv(x).chunk(3, dim=-1)
        k, q = self.features(k), self.features(q)  # (B, N, m)
        total = q @ k.sum(1, keepdim=True).transpose(1, 2)  # (B, N, 1)
        mixed = q @ (k.transpose(1, 2) @ v) / (total + 1e-8)
        skipped: Tensor = v + self.proj(mixed)  # the skip connection is around the values: x has another width
        return skipped

    def features(self, x: Tensor) -> Tensor:
        return torch.exp(x @ self.w.T - x.square().sum(-1, keepdim=True) / 2) / math.sqrt(len(self.w))


class ReductionCell(nn.Module):
    """Performer attention on the output of the PRM, in parallel with three convolutions; then an MLP."""

    def __init__(self, in_chs: int, cell: Reduction) -> None:
        super().__init__()
        strides = [2 if 2**place < cell.ratio else 1 for place in range(3)]
        patches = cell.embed * cell.dilations
        self.PRM = PRM(in_chs, cell)
        self.norm1 = nn.LayerNorm(patches, EPS)
        self.attn = Performer(patches, cell.tokens)
        self.PCM = nn.Sequential(
            nn.Conv2d(in_chs, cell.embed, 3, strides[0], padding=1),
            nn.SiLU(),
            nn.Conv2d(cell.embed, cell.embed, 3, strides[1], padding=1),
            nn.BatchNorm2d(cell.embed),
            nn.SiLU(),
            nn.Conv2d(cell.embed, cell.tokens, 3, strides[2], padding=1),
            nn.SiLU(),
        )
        self.norm2 = nn.LayerNorm(cell.tokens, EPS)
        self.mlp = Mlp(cell.tokens)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.PRM(x)  # (B, C, H, W)
        tokens = self.attn(self.norm1(as_tokens(patches))) + as_tokens(self.PCM(x))
        tokens = tokens + self.mlp(self.norm2(tokens))
        out: Tensor = tokens.transpose(1, 2).reshape(x.shape[0], -1, *patches.shape[2:])
        return out


class NormalBlock(nn.Module):
    """A normal cell: attention in parallel with three grouped convolutions, then an MLP."""

    def __init__(self, dim: int, cells: Cells, drop_path: float) -> None:
        super().__init__()
        hidden = dim * cells.mlp_ratio
        self.norm1 = nn.LayerNorm(dim, EPS)
        self.attn = Attention(dim, cells.heads, qkv_bias=True)
        self.PCM = nn.Sequential(
            nn.Conv2d(dim, hidden, 3, padding=1, groups=cells.groups),
            nn.BatchNorm2d(hidden),
            nn.SiLU(),
            nn.Conv2d(hidden, dim, 3, padding=1, groups=cells.groups),
            nn.BatchNorm2d(dim),
            nn.SiLU(),
            nn.Conv2d(dim, dim, 3, padding=1, groups=cells.groups),
            nn.SiLU(),
        )
        self.drop_path = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim, EPS)
        self.mlp = Mlp(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        side = math.isqrt(x.shape[1])
        local = self.PCM(x.transpose(1, 2).reshape(x.shape[0], -1, side, side))
        x = x + self.drop_path(self.attn(self.norm1(x)) + as_tokens(local))
        out: Tensor = x + self.drop_path(self.mlp(self.norm2(x)))
        return out


_SMALL_CELLS = (Reduction(64, 64, 7, 4, 4), Reduction(64, 64, 3, 2, 3), Reduction(192, 384, 3, 2, 2))
_TINY_CELLS = (Reduction(24, 32, 3, 2, 3), Reduction(32, 32, 3, 2, 2), Reduction(64, 128, 3, 1, 2))


@family(
    {
        "cifar/vitae": Size(
            "ViTAE-S, 22.8 M parameters, with four tokens of a 32×32 image.",
            Cells(_SMALL_CELLS, depth=14, heads=6, groups=96),
        ),
        "tiny/vitae": Size(
            "ViTAE of 1.1 M parameters for 32×32 images, with 64 tokens.",
            Cells(_TINY_CELLS, depth=5, heads=4, groups=32),
        ),
    },
    paper="Xu et al. 2021, ViTAE",
    category="hybrid",
    blocks=(Blocks("blocks.*", "tokens"),),
)
class ViTAE(nn.Module):
    """Tang et al. give 23.18 M parameters for ViTAE-S on ten classes, which is the count with a head for 1000."""

    def __init__(
        self,
        cells: Cells,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: int = 32,
        drop_path_rate: float = 0.0,
    ) -> None:
        stride = math.prod(each.ratio for each in cells.reductions)
        if img_size < stride or img_size % stride:
            raise ValueError(f"img_size: must be a multiple of {stride}, by which the map shrinks, got {img_size}")
        super().__init__()
        *first, last = cells.reductions
        self.reductions = nn.Sequential()
        in_chs = in_chans
        for cell in first:
            self.reductions.append(ReductionCell(in_chs, cell))
            in_chs = cell.tokens
        self.reductions.append(PRM(in_chs, last))
        rates = torch.linspace(0, drop_path_rate, cells.depth, device="cpu").tolist()
        self.blocks = nn.Sequential(*(NormalBlock(last.tokens, cells, rate) for rate in rates))
        self.head = nn.Linear(last.tokens, num_classes)
        self.apply(truncated_linear)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(as_tokens(self.reductions(x))).mean(1))
        return logits

"""CoAtNet (Dai et al. 2021): stages of convolution (C) or of attention with relative positions (T), in any order."""

from __future__ import annotations

import torch.nn.functional as F
from timm.layers import Mlp, RelPosBias, SqueezeExcite
from torch import Tensor, nn

from bastion.models.classifier import Blocks
from bastion.models.family import Size, family
from bastion.models.stems import as_image, as_tokens

_HEADS, _HEAD_DIM = 8, 32


class MBConvBlock(nn.Module):
    """Pre-norm inverted bottleneck with squeeze-and-excitation; the first of a stage halves the map."""

    def __init__(self, in_chs: int, out_chs: int, _grid: int, *, halves: bool) -> None:
        super().__init__()
        wide = 4 * in_chs
        self.norm = nn.BatchNorm2d(in_chs)
        self.conv = nn.Sequential(
            *(nn.Conv2d(in_chs, wide, 1, 2 if halves else 1, bias=False), nn.BatchNorm2d(wide), nn.GELU()),
            *(nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.GELU()),
            SqueezeExcite(wide, rd_channels=in_chs // 4, bias=False, act_layer=nn.GELU),
            *(nn.Conv2d(wide, out_chs, 1, bias=False), nn.BatchNorm2d(out_chs)),
        )
        self.skip = _skip(in_chs, out_chs) if halves else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.skip(x) + self.conv(self.norm(x))
        return summed


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP on a feature map; the first of a stage pools the map first."""

    def __init__(self, in_chs: int, out_chs: int, grid: int, *, halves: bool) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(3, 2, padding=1) if halves else nn.Identity()
        self.norm1 = nn.LayerNorm(in_chs)
        self.attn = RelativeAttention(in_chs, out_chs, grid)
        self.skip = nn.Conv2d(in_chs, out_chs, 1, bias=False) if halves else nn.Identity()
        self.norm2 = nn.LayerNorm(out_chs)
        self.mlp = Mlp(out_chs, 4 * in_chs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(x)
        branch: Tensor = self.attn(self.norm1(as_tokens(x)))  # (B, N, out_chs)
        x = self.skip(x)
        tokens = as_tokens(x) + branch
        branch = self.mlp(self.norm2(tokens))
        return as_image(tokens + branch, x.shape[2:])


class RelativeAttention(nn.Module):
    """Self-attention with a learned bias for each relative position on the grid."""

    def __init__(self, in_chs: int, out_chs: int, grid: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(in_chs, 3 * _HEADS * _HEAD_DIM, bias=False)
        self.rel_pos = RelPosBias((grid, grid), _HEADS)
        self.proj = nn.Linear(_HEADS * _HEAD_DIM, out_chs)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, _HEADS, _HEAD_DIM)).permute(2, 0, 3, 1, 4)  # each (B, heads, N, 32)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=self.rel_pos.get_bias())
        projected: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return projected


def _skip(in_chs: int, out_chs: int) -> nn.Sequential:
    return nn.Sequential(nn.MaxPool2d(3, 2, padding=1), nn.Conv2d(in_chs, out_chs, 1, bias=False))


def _conv(in_chs: int, out_chs: int, stride: int) -> nn.Sequential:
    conv = nn.Conv2d(in_chs, out_chs, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_chs), nn.GELU())


@family(
    {
        "cifar/coatnet": Size(
            "CoAtNet-0 for CIFAR-10, 17 M parameters: four stages, each of convolution (C) or attention (T).",
            *((64, 96, 192, 384, 768), (2, 3, 5, 2), 2),
        ),
        "tiny/coatnet": Size(
            "CoAtNet small enough for two cores, 0.9 M parameters; a stem of stride 1, so maps of 16, 8, 4, 2 at 32.",
            *((32, 32, 64, 96, 128), (2, 2, 2, 2), 1),
        ),
    },
    paper="Dai et al. 2021, CoAtNet",
    category="hybrid",
    blocks=(Blocks("stages.*.*", "tokens", having="attn"), Blocks("stages.*.*")),
)
class CoAtNet(nn.Module):
    """Each stage halves the feature map: to 8, 4, 2, 1 at 32 pixels and 56, 28, 14, 7 at 224 (stem of stride 2)."""

    def __init__(
        self,
        widths: tuple[int, ...],
        depths: tuple[int, ...],
        stem_stride: int,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: int = 32,
        stages: str = "CCTT",
    ) -> None:
        super().__init__()
        if len(stages) != 4 or set(stages) - set("CT"):
            raise ValueError(f"stages must be four letters, each C or T, got {stages!r}")
        if img_size % (16 * stem_stride):
            raise ValueError(f"img_size must be a multiple of {16 * stem_stride}, got {img_size}")
        kinds = {"C": MBConvBlock, "T": TransformerBlock}
        in_chs, grid = widths[0], img_size // stem_stride
        self.stem = nn.Sequential(_conv(in_chans, in_chs, stem_stride), _conv(in_chs, in_chs, 1))
        self.stages = nn.Sequential()
        for letter, out_chs, depth in zip(stages, widths[1:], depths, strict=True):
            kind, grid = kinds[letter], grid // 2
            others = (kind(out_chs, out_chs, grid, halves=False) for _ in range(depth - 1))
            self.stages.append(nn.Sequential(kind(in_chs, out_chs, grid, halves=True), *others))
            in_chs = out_chs
        self.head = nn.Linear(in_chs, num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stages(self.stem(x)).mean(dim=(2, 3)))
        return logits

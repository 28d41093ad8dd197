"""RVT (Mao et al. 2022, Towards Robust Vision Transformer): convolutional stem and FFNs, position-aware attention.

`qkv: conv` is the variant in the code of RSPC.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from timm.layers import DropPath, Mlp, trunc_normal_
from torch import Tensor, nn

from bastion.models.classifier import Blocks
from bastion.models.family import SMALL, Size, family
from bastion.models.stems import GridShape, as_image, as_tokens, patch_grid

QKV = Literal["linear", "conv"]

_STEM_STRIDES = {16: (2, 2), 8: (1, 2), 4: (1, 1)}  # by patch size: of the first convolution and of the pooling


class PatchEmbed(nn.Module):
    """7×7 convolution, BatchNorm, max-pooling, 4×4 convolution. Patches below 16 have smaller strides, same weights."""

    def __init__(self, img_size: int, patch_size: int, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.grid_size = patch_grid(img_size, patch_size, _STEM_STRIDES)
        self.patch_size = (patch_size, patch_size)
        first, pool = _STEM_STRIDES[patch_size]
        self.proj = nn.Sequential(
            nn.Conv2d(in_chans, 32, 7, first, padding=2 if first == 2 else 3),  # the authors' 2 would crop at stride 1
            nn.BatchNorm2d(32),
            nn.MaxPool2d(3, pool, padding=1),
            nn.Conv2d(32, embed_dim, 4, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        patches: Tensor = self.proj(x)
        return patches  # (B, d, H, W)


class Attention(nn.Module):
    """Self-attention. Given a number of tokens, logits are scaled by sigmoid(P), P learned for each pair of tokens."""

    def __init__(self, dim: int, num_heads: int, qkv: QKV, tokens: int | None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim) if qkv == "linear" else None
        hidden = 3 * dim // 12  # as many weights as the linear layer
        self.patch_reasoning = (
            nn.Sequential(nn.Conv2d(dim, hidden, 3, padding=1), nn.ReLU(), nn.Conv2d(hidden, 3 * dim, 1))
            if qkv == "conv"
            else None
        )
        self.att_mask = None
        if tokens is not None:
            self.att_mask = nn.Parameter(trunc_normal_(torch.empty(num_heads, tokens, tokens), std=0.02))
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, grid: GridShape) -> Tensor:
        qkv = self._project(x, grid).reshape(*x.shape[:2], 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, N, d / heads) each
        if self.att_mask is None:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            _check_tokens(x.shape[1], self.att_mask.shape[1])
            logits = (q @ k.transpose(-2, -1)) * (self.scale * self.att_mask.sigmoid())  # (B, heads, N, N)
            mixed = logits.softmax(dim=-1) @ v
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _project(self, x: Tensor, grid: GridShape) -> Tensor:
        if self.patch_reasoning is not None:
            return as_tokens(self.patch_reasoning(as_image(x, grid)))
        assert self.qkv is not None
        projected: Tensor = self.qkv(x)
        return projected


def _check_tokens(got: int, made_for: int) -> None:
    if got != made_for:
        raise ValueError(
            f"the position-aware scaling is made for {made_for} tokens, got {got}; set img_size and patch_size, "
            "or masked_blocks: 0, which takes any size"
        )


class ConvFFN(nn.Module):
    """1×1, depthwise 3×3 and 1×1 convolutions, each with BatchNorm, on the grid of tokens."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(dim, hidden, 1)
        self.bn1 = nn.BatchNorm2d(hidden)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.bn2 = nn.BatchNorm2d(hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Conv2d(hidden, dim, 1)
        self.bn3 = nn.BatchNorm2d(dim)

    def forward(self, x: Tensor, grid: GridShape) -> Tensor:
        x = self.act(self.bn1(self.fc1(as_image(x, grid))))
        x = self.act(self.bn2(self.dwconv(x)))
        return as_tokens(self.bn3(self.fc2(x)))


class RVTBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(
        self, dim: int, num_heads: int, *, qkv: QKV, tokens: int | None, conv_ffn: bool, drop_path_rate: float
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads, qkv, tokens)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = ConvFFN(dim, 4 * dim) if conv_ffn else Mlp(dim, 4 * dim)
        self.drop_path = DropPath(drop_path_rate)

    def forward(self, x: Tensor, grid: GridShape) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x), grid))
        y = self.norm2(x)
        out: Tensor = x + self.drop_path(self.mlp(y, grid) if isinstance(self.mlp, ConvFFN) else self.mlp(y))
        return out


class Stage(nn.Module):
    """Transformer blocks on a feature map, (B, d, H, W) to (B, d, H, W)."""

    def __init__(self, blocks: Iterable[RVTBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        grid = x.shape[2:]
        x = as_tokens(x)
        for block in self.blocks:
            x = block(x, grid)
        return as_image(x, grid)


@family(
    {
        "rvt/ti": Size("RVT-Ti*: two stages, 11.0 M parameters.", 32, (6, 12), (10, 2), masked_blocks=10),
        "rvt/s": Size("RVT-S*: 12 blocks, 23.3 M parameters.", 64, (6,), (12,)),
        "rvt/b": Size("RVT-B*: 12 blocks with plain FFNs, 88.5 M parameters.", 64, (12,), (12,), False),
        "tiny/rvt": Size(
            "RVT* for 32×32 images: 64 tokens, then 16; 1.2 M parameters.",
            *(32, (3, 6), (5, 1)),
            patch_size=4,
            **SMALL,
        ),
    },
    paper="Mao et al. 2022, Towards Robust Vision Transformer",
    category="hybrid",
    blocks=(Blocks("transformers.*.blocks.*", "tokens"),),
)
class RVT(nn.Module):
    """Each stage has half the grid and twice the width of the one before; the head gets the mean of the last tokens.

    The first `masked_blocks` blocks scale their attention logits by position (RVT*); 0: plain RVT. `qkv: conv` computes
    queries, keys and values by convolutions, as the `_afat` models of RSPC do.
    """

    def __init__(
        self,
        head_dim: int,
        heads: tuple[int, ...],  # of each stage
        depths: tuple[int, ...],
        conv_ffn: bool = True,
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int = 224,
        patch_size: int = 16,
        masked_blocks: int = 5,
        qkv: QKV = "linear",
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if not 0 <= masked_blocks <= depths[0]:
            raise ValueError(f"masked_blocks: expected 0 to {depths[0]} (of the first stage), got {masked_blocks}")
        dims = [head_dim * number for number in heads]
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, dims[0])
        rows, columns = self.patch_embed.grid_size
        stages, total, done = [], sum(depths), 0
        for dim, num_heads, depth in zip(dims, heads, depths, strict=True):
            stages.append(
                Stage(
                    RVTBlock(
                        dim,
                        num_heads,
                        qkv=qkv,
                        tokens=rows * columns if number < masked_blocks else None,
                        conv_ffn=conv_ffn,
                        drop_path_rate=drop_path_rate * number / total,
                    )
                    for number in range(done, done + depth)
                )
            )
            done += depth
        self.transformers = nn.ModuleList(stages)
        self.pools = nn.ModuleList(
            nn.Sequential(OrderedDict(conv=nn.Conv2d(in_chs, out_chs, 3, 2, padding=1, groups=in_chs)))
            for in_chs, out_chs in pairwise(dims)
        )
        self.norm = nn.LayerNorm(dims[-1], eps=1e-6)
        self.head = nn.Linear(dims[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.transformers[0](self.patch_embed(x))
        for pool, transformer in zip(self.pools, self.transformers[1:], strict=True):
            x = transformer(pool(x))
        logits: Tensor = self.head(self.norm(x.mean(dim=(2, 3))))
        return logits

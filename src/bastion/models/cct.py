"""Compact Convolutional Transformers (Hassani et al. 2021): a convolutional tokenizer, and attention pooling."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from timm.layers import Attention, DropPath, Mlp
from torch import Tensor, nn

from bastion.models.classifier import Blocks
from bastion.models.family import Size, family
from bastion.models.initial import truncated_linear

# As in the paper's names: CCT-7/3x1 has 7 blocks and one 3×3 convolution.
Tokenizing = Literal["3x1", "3x2", "7x1", "7x2"]


class Tokenizer(nn.Module):
    """Convolutions without bias, each with ReLU and max-pooling, instead of a patch embedding."""

    def __init__(self, kind: Tokenizing, img_size: int, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        kernel, count = map(int, kind.split("x"))
        stride = max(1, kernel // 2 - 1)
        patch = (2 * stride) ** count
        if img_size % patch:
            raise ValueError(f"img_size must be a multiple of {patch} with the tokenizer {kind}, got {img_size}")
        self.patch_size = (patch, patch)
        self.grid_size = (img_size // patch, img_size // patch)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        layers: list[nn.Module] = []
        for in_chs, out_chs in pairwise((in_chans, *[64] * (count - 1), embed_dim)):
            layers += [nn.Conv2d(in_chs, out_chs, kernel, stride, kernel // 2, bias=False), nn.ReLU()]
            layers += [nn.MaxPool2d(3, 2, padding=1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.flatten(self.layers(x), 2).transpose(1, 2)  # (B, N, d)


class CCTBlock(nn.Module):
    """Pre-norm attention, then an MLP; the second norm is before the skip connection branches off."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, attn_drop: float, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads, qkv_bias=False, attn_drop=attn_drop)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2(x + self.drop_path(self.attn(self.norm1(x))))
        branch: Tensor = self.drop_path(self.mlp(x))
        return x + branch


@family(
    {
        "cifar/cct": Size(
            "CCT-7/3x1 for CIFAR-10, 3.8 M parameters: 256 tokens from one convolution, 256 wide, 7 deep.",
            *(256, 7, 4, 2.0),
        ),
        "tiny/cct": Size(
            "CCT-4/3x2, small enough for two cores, 0.5 M parameters: 64 tokens, 128 wide, 4 deep.",
            *(128, 4, 2, 1.0),
            tokenizer="3x2",
        ),
    },
    paper="Hassani et al. 2021, Escaping the big data paradigm with compact transformers",
    category="hybrid",
    blocks=(Blocks("blocks.*", "tokens"),),
)
class CCT(nn.Module):
    """By default the tokenizer is 3x1, and 7x2 above 64 pixels: 196 tokens at 224, where 3x1 would give 12,544."""

    def __init__(
        self,
        embed_dim: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: int = 32,
        tokenizer: Tokenizing | None = None,
        attn_drop_rate: float = 0.1,
        drop_path_rate: float = 0.1,
    ) -> None:
        super().__init__()
        kind = tokenizer or ("3x1" if img_size <= 64 else "7x2")
        self.patch_embed = Tokenizer(kind, img_size, in_chans, embed_dim)
        self.pos_embed = nn.Parameter(torch.empty(1, self.patch_embed.num_patches, embed_dim))
        rates = [drop_path_rate * i / max(1, depth - 1) for i in range(depth)]
        self.blocks = nn.Sequential(*(CCTBlock(embed_dim, num_heads, mlp_ratio, attn_drop_rate, r) for r in rates))
        self.norm = nn.LayerNorm(embed_dim)
        self.attention_pool = nn.Linear(embed_dim, 1)
        self.head = nn.Linear(embed_dim, num_classes)
        nn.init.trunc_normal_(self.pos_embed, std=0.2)
        self.apply(_init)

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed"}

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.patch_embed(x) + self.pos_embed))
        weights = self.attention_pool(x).softmax(dim=1)  # (B, N, 1)
        logits: Tensor = self.head((weights * x).sum(dim=1))
        return logits


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)
    else:
        truncated_linear(module)

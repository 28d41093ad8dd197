"""T2T-ViT (Yuan et al. 2021, Tokens-to-Token ViT): two transformer layers on overlapping patches, then a deep ViT.

These are the paper's `t` models, whose stem has transformer layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.layers import Mlp, calculate_drop_path_rates, trunc_normal_
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from bastion.models.classifier import Blocks
from bastion.models.family import SMALL, Size, family
from bastion.models.initial import truncated_linear
from bastion.models.stems import as_image, patch_grid

_STRIDES = {16: (4, 2, 2), 8: (2, 2, 2), 4: (2, 2, 1)}  # of the three soft splits, by patch size


class TokenAttention(nn.Module):
    """Single-head attention with a smaller output; the skip connection is around the values, which have its width."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.scale = in_dim**-0.5  # by the width of the input, as in the authors' code
        self.qkv = nn.Linear(in_dim, 3 * out_dim, bias=False)
        self.proj = nn.Linear(out_dim, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)  # (B, 1, N, d) each
        mixed = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        out: Tensor = v[:, 0] + self.proj(mixed[:, 0])
        return out


class TokenTransformer(nn.Module):
    """A transformer layer of the stem, (B, N, in_dim) to (B, N, out_dim)."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(in_dim)
        self.attn = TokenAttention(in_dim, out_dim)
        self.norm2 = nn.LayerNorm(out_dim)
        self.mlp = Mlp(out_dim, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class TokensToToken(nn.Module):
    """Three soft splits into overlapping patches; a transformer layer follows the first two, a projection the last."""

    def __init__(self, img_size: int, patch_size: int, in_chans: int, embed_dim: int, token_dim: int = 64) -> None:
        super().__init__()
        self.grid_size = patch_grid(img_size, patch_size, _STRIDES)
        self.patch_size = (patch_size, patch_size)
        first, second, third = _STRIDES[patch_size]
        self.sides = (img_size // first, img_size // first // second)  # of the grids after the first two splits
        self.soft_split0 = nn.Unfold(7, stride=first, padding=2 if first == 4 else 3)
        self.attention1 = TokenTransformer(in_chans * 7 * 7, token_dim)
        self.soft_split1 = nn.Unfold(3, stride=second, padding=1)
        self.attention2 = TokenTransformer(token_dim * 3 * 3, token_dim)
        self.soft_split2 = nn.Unfold(3, stride=third, padding=1)
        self.project = nn.Linear(token_dim * 3 * 3, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        after_first, after_second = self.sides
        x = self.attention1(self.soft_split0(x).transpose(1, 2))  # (B, N, token_dim)
        x = self.attention2(self.soft_split1(as_image(x, (after_first, after_first))).transpose(1, 2))
        tokens: Tensor = self.project(self.soft_split2(as_image(x, (after_second, after_second))).transpose(1, 2))
        return tokens


@family(
    {
        "t2t/14": Size("T2T-ViT-t-14: 21.5 M parameters.", 384, 14, 6),
        "t2t/24": Size("T2T-ViT-t-24: 64.1 M parameters.", 512, 24, 8),
        "tiny/t2t": Size("T2T-ViT for 32×32 images: 64 tokens, 1.2 M parameters.", 128, 6, 4, patch_size=4, **SMALL),
    },
    paper="Yuan et al. 2021, Tokens-to-Token ViT",
    category="Transformer",
    blocks=(Blocks("blocks.*", "tokens"),),
)
class T2TViT(nn.Module):
    """The stem, a class token, fixed sinusoidal positions, and pre-norm blocks."""

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int = 224,
        patch_size: int = 16,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.patch_embed = TokensToToken(img_size, patch_size, in_chans, dim)
        rows, columns = self.patch_embed.grid_size
        self.cls_token = nn.Parameter(trunc_normal_(torch.empty(1, 1, dim), std=0.02))
        # Not trained, but a parameter, because the published parameter counts include it.
        self.pos_embed = nn.Parameter(sinusoids(1 + rows * columns, dim), requires_grad=False)
        self.blocks = nn.ModuleList(
            Block(dim, heads, mlp_ratio=3.0, drop_path=rate, norm_layer=nn.LayerNorm)
            for rate in calculate_drop_path_rates(drop_path_rate, depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        self.apply(truncated_linear)

    def no_weight_decay(self) -> set[str]:
        return {"cls_token", "pos_embed"}

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits


def sinusoids(positions: int, dim: int) -> Tensor:
    """(1, positions, dim): alternating sines and cosines of wavelengths from 2π to 20000π (Vaswani et al. 2017)."""
    frequencies = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(positions, dtype=torch.float64).unsqueeze(1) * frequencies
    table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
    return table.unsqueeze(0).to(torch.get_default_dtype())

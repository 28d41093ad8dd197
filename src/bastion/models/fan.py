"""FAN (Zhou et al. 2022, Understanding the Robustness in Vision Transformers): attention to tokens and channels."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch
import torch.nn.functional as F
from timm.layers import DropPath, LayerNorm, LayerNorm2d, trunc_normal_
from timm.models.convnext import ConvNeXtStage
from timm.models.xcit import LPI, ClassAttentionBlock, ConvPatchEmbed, PositionalEncodingFourier
from torch import Tensor, nn

from bastion.models.classifier import Blocks
from bastion.models.family import SMALL, Size, family
from bastion.models.initial import truncated, truncated_linear
from bastion.models.stems import GridShape, as_tokens, patch_grid
from bastion.models.xcit import UNSTRIDED, make_finer

_HYBRID_STRIDES = {16: 4, 8: 2}  # by patch size: stride of the first convolution


class PlainStem(nn.Module):
    """XCiT's stem of four 3×3 convolutions of stride 2; for patches below 16, the first ones have stride 1."""

    def __init__(self, img_size: int, patch_size: int, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.grid_size = patch_grid(img_size, patch_size, UNSTRIDED)
        self.patch_size = (patch_size, patch_size)
        self.proj = ConvPatchEmbed(img_size, 16, in_chans, embed_dim).proj
        make_finer(self.proj, patch_size)

    def forward(self, x: Tensor) -> Tensor:
        patches: Tensor = self.proj(x)
        return patches  # (B, d, H, W)


class HybridStem(nn.Module):
    """The first two stages of a ConvNeXt, and a 2×2 convolution; for patches of 8, the first layer has stride 2."""

    def __init__(self, img_size: int, patch_size: int, in_chans: int, embed_dim: int, depths: tuple[int, int]) -> None:
        super().__init__()
        self.grid_size = patch_grid(img_size, patch_size, _HYBRID_STRIDES)
        self.patch_size = (patch_size, patch_size)
        stride = _HYBRID_STRIDES[patch_size]
        stage = partial(ConvNeXtStage, ls_init_value=1e-6, norm_layer=LayerNorm2d, norm_layer_cl=LayerNorm)
        self.backbone = nn.Sequential(
            OrderedDict(
                stem=nn.Sequential(
                    nn.Conv2d(in_chans, 128, 4, stride, padding=(4 - stride) // 2),
                    LayerNorm2d(128),
                ),
                stages=nn.Sequential(
                    stage(128, 128, stride=1, depth=depths[0]), stage(128, 256, stride=2, depth=depths[1])
                ),
            )
        )
        for module in self.backbone.modules():
            if isinstance(module, nn.Conv2d):
                truncated(module)
        self.proj = nn.Conv2d(256, embed_dim, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        patches: Tensor = self.proj(self.backbone(x))
        return patches  # (B, d, H, W)


class TokenAttention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).reshape(*x.shape[:2], self.num_heads, -1).transpose(1, 2)  # (B, heads, N, d / heads)
        k, v = self.kv(x).reshape(*x.shape[:2], 2, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class ConvFFN(nn.Module):
    """Two linear layers with depthwise convolutions and a skip connection between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.dwconv = LPI(hidden)
        self.gamma = nn.Parameter(torch.ones(hidden))
        self.fc2 = nn.Linear(hidden, dim)
        for convolution in (self.dwconv.conv1, self.dwconv.conv2):
            nn.init.normal_(convolution.weight, std=(2 / 9) ** 0.5)  # variance 2 / fan-out, which is 3 · 3
            nn.init.zeros_(convolution.bias)

    def forward(self, x: Tensor, grid: GridShape) -> Tensor:
        x = self.fc1(x)
        out: Tensor = self.fc2(x + self.gamma * self.dwconv(x, *grid))
        return out


class ChannelGate(nn.Module):
    """An FFN whose output channels are weighted by channel attention.

    A channel's weight is the sigmoid of the inner product of two distributions over tokens: its query's, and the mean
    of its head's keys.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.temperature = nn.Parameter(torch.ones(num_heads, 1, 1))
        self.q = nn.Linear(dim, dim)
        self.mlp_v = ConvFFN(dim, 4 * dim)
        self.norm_v = nn.LayerNorm(dim)

    def forward(self, x: Tensor, grid: GridShape) -> Tensor:
        # Softmax over tokens, dim 1: these are not attention maps over keys.
        split = (*x.shape[:2], self.num_heads, -1)
        q = torch.softmax(self.q(x), dim=1).reshape(split)  # (B, N, heads, d / heads)
        k = torch.softmax(x, dim=1).reshape(split).mean(-1)  # (B, N, heads)
        gate = torch.einsum("bnhc,bnh->bhc", q, k).sigmoid() * self.temperature[..., 0]
        value: Tensor = self.norm_v(self.mlp_v(x, grid))
        return gate.flatten(1).unsqueeze(1) * value


class FANBlock(nn.Module):
    """A pre-norm block with LayerScale: token attention, then the FFN with channel attention."""

    def __init__(self, dim: int, num_heads: int, drop_path_rate: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = TokenAttention(dim, num_heads)
        self.gamma1 = nn.Parameter(torch.ones(dim))
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = ChannelGate(dim, num_heads)
        self.gamma2 = nn.Parameter(torch.ones(dim))
        self.drop_path = DropPath(drop_path_rate)

    def forward(self, x: Tensor, grid: GridShape) -> Tensor:
        x = x + self.drop_path(self.gamma1 * self.attn(self.norm1(x)))
        out: Tensor = x + self.drop_path(self.gamma2 * self.mlp(self.norm2(x), grid))
        return out


@family(
    {
        "fan/hybrid-t": Size("FAN-T-Hybrid: ConvNeXt stem, 7.5 M parameters.", 192, 8, 8, (3, 3)),
        "fan/hybrid-s": Size("FAN-S-Hybrid: ConvNeXt stem, 26.1 M parameters.", 384, 10, 8, (3, 3)),
        "fan/hybrid-b": Size("FAN-B-Hybrid: ConvNeXt stem, 50.5 M parameters.", 448, 16, 8, (3, 3)),
        "fan/hybrid-l": Size("FAN-L-Hybrid: ConvNeXt stem, 76.9 M parameters.", 480, 22, 10, (3, 5), 1e-3),
        "fan/vit-t": Size("FAN-T-ViT: 7.3 M parameters.", 192, 12, 4),
        "fan/vit-s": Size("FAN-S-ViT: 28.3 M parameters.", 384, 12, 8),
        "fan/vit-b": Size("FAN-B-ViT: 54.4 M parameters.", 448, 18, 8),
        "fan/vit-l": Size("FAN-L-ViT: 80.6 M parameters.", 480, 24, 10, None, 1e-3),
        "tiny/fan": Size("FAN-ViT for 32×32 images: 64 tokens, 1.1 M parameters.", 96, 6, 4, patch_size=4, **SMALL),
    },
    paper="Zhou et al. 2022, Understanding the Robustness in Vision Transformers",
    category="hybrid",
    blocks=(
        Blocks("patch_embed.backbone.stages.*.blocks.*"),
        Blocks("blocks.*", "tokens"),
        Blocks("cls_attn_blocks.*", "class"),
    ),
)
class FAN(nn.Module):
    """A stem, Fourier position encodings, FAN blocks, and two blocks of class attention."""

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        stem_depths: tuple[int, int] | None = None,  # of the two ConvNeXt stages; None: a plain stem
        head_scale: float = 1.0,
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int = 224,
        patch_size: int = 16,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.patch_embed: PlainStem | HybridStem
        if stem_depths is None:
            self.patch_embed = PlainStem(img_size, patch_size, in_chans, dim)
        else:
            self.patch_embed = HybridStem(img_size, patch_size, in_chans, dim, stem_depths)
        self.pos_embed = PositionalEncodingFourier(dim=dim)
        self.blocks = nn.ModuleList(FANBlock(dim, heads, drop_path_rate) for _ in range(depth))
        self.cls_token = nn.Parameter(trunc_normal_(torch.empty(1, 1, dim), std=0.02))
        norm = partial(nn.LayerNorm, eps=1e-6)
        self.cls_attn_blocks = nn.ModuleList(
            ClassAttentionBlock(dim, heads, qkv_bias=True, norm_layer=norm, eta=1.0, tokens_norm=True) for _ in range(2)
        )
        self.norm = norm(dim)
        self.head = nn.Linear(dim, num_classes)
        self.apply(truncated_linear)
        with torch.no_grad():
            self.head.weight.mul_(head_scale)

    def no_weight_decay(self) -> set[str]:
        return {"cls_token"}

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        grid = x.shape[2:]
        x = as_tokens(x + self.pos_embed(1, *grid))
        for block in self.blocks:
            x = block(x, grid)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        for block in self.cls_attn_blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits

"""MLP-Mixer (Tolstikhin et al. 2021) for CIFAR-10, with a class token that the head reads."""

from __future__ import annotations

import torch
from timm.layers import PatchEmbed
from timm.models.mlp_mixer import MixerBlock
from torch import Tensor, nn

from bastion.models.classifier import Blocks
from bastion.models.family import Size, family
from bastion.models.stems import check_patches


@family(
    {
        "cifar/mixer": Size(
            "MLP-Mixer for CIFAR-10, 0.7 M parameters: 128 wide, 8 deep, wide over tokens and narrow over channels.",
            *(128, 8, 512, 64),
        ),
        "tiny/mixer": Size(
            "MLP-Mixer small enough for two cores, 1.1 M parameters: its paper's proportions, narrow over tokens.",
            *(128, 8, 64, 512),
        ),
    },
    paper="Tolstikhin et al. 2021, MLP-Mixer",
    category="Transformer",
    blocks=(Blocks("blocks.*"),),
)
class Mixer(nn.Module):
    """Blocks of a token-mixing and a channel-mixing MLP on patch tokens and a class token, which the head reads."""

    def __init__(
        self,
        embed_dim: int,
        depth: int,
        token_dim: int,
        channel_dim: int,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: int = 32,
        patch_size: int = 4,
    ) -> None:
        super().__init__()
        check_patches(img_size, patch_size)
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, embed_dim))
        tokens = 1 + self.patch_embed.num_patches
        ratios = (token_dim / embed_dim, channel_dim / embed_dim)  # timm's ratios are both relative to embed_dim
        self.blocks = nn.Sequential(
            *(MixerBlock(embed_dim, tokens, mlp_ratio=ratios, norm_layer=nn.LayerNorm) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes)

    def no_weight_decay(self) -> set[str]:
        return {"cls_token"}

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), self.patch_embed(x)], dim=1)  # (B, 1 + N, d)
        logits: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return logits

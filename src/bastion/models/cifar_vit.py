"""ViT and CPVT for CIFAR-10 as in Tang et al. 2022: the same blocks, with learned or conditional position encodings."""

from __future__ import annotations

from typing import Any, Literal

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from bastion.models.classifier import Blocks
from bastion.models.family import Size, family
from bastion.models.stems import as_image, as_tokens, check_patches

Pool = Literal["token", "avg"]


class Gain(nn.Module):
    """Multiplies by a constant."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class PEG(nn.Module):
    """Positional encoding generator (PEG): a depthwise 3×3 convolution over the patch tokens, added to them."""

    def __init__(self, dim: int, grid: tuple[int, int], prefix: int) -> None:
        super().__init__()
        self.grid, self.prefix = grid, prefix
        self.proj = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor) -> Tensor:
        prefix, patches = x[:, : self.prefix], x[:, self.prefix :]
        return torch.cat([prefix, patches + as_tokens(self.proj(as_image(patches, self.grid)))], dim=1)


class ConditionalViT(VisionTransformer):  # type: ignore[misc]
    """A ViT with a PEG after the first block instead of position embeddings."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(pos_embed="none", **settings)
        self.pos_block = PEG(self.embed_dim, self.patch_embed.grid_size, self.num_prefix_tokens)

    def forward_features(self, x: Tensor, **_: Any) -> Tensor:
        first, *others = self.blocks
        x = self.pos_drop(self._pos_embed(self.patch_embed(x)))
        x = self.pos_block(first(x))
        for block in others:
            x = block(x)
        normed: Tensor = self.norm(x)
        return normed


def _trunk(
    kind: type[VisionTransformer],
    *,
    img_size: int,
    patch_size: int,
    num_heads: int,
    drop_rate: float,
    **settings: Any,
) -> Any:
    check_patches(img_size, patch_size)
    network = kind(
        img_size=img_size,
        patch_size=patch_size,
        depth=6,
        num_heads=num_heads,
        mlp_ratio=1.0,
        qkv_bias=False,
        pos_drop_rate=drop_rate,
        proj_drop_rate=drop_rate,
        norm_layer=nn.LayerNorm,
        weight_init="skip",  # torch's own, as in the source
        **settings,
    )
    for block in network.blocks:
        block.attn.q_norm = Gain(num_heads**-0.5)  # attention logits are scaled by embed_dim^-0.5, not by head_dim^-0.5
    for tokens in (network.cls_token, network.pos_embed):
        if tokens is not None:
            nn.init.normal_(tokens)
    return network


@family(
    {"cifar/vit": Size("ViT for CIFAR-10, 9.8 M parameters: 512 wide, 6 deep, MLPs of ratio 1, a head of two layers.")},
    paper="Dosovitskiy et al. 2021, An image is worth 16×16 words",
    category="Transformer",
    blocks=(Blocks("blocks.*", "tokens"),),
)
def vit(
    *, num_classes: int = 10, in_chans: int = 3, img_size: int = 32, patch_size: int = 4, drop_rate: float = 0.1
) -> Any:
    network = _trunk(
        VisionTransformer,
        img_size=img_size,
        patch_size=patch_size,
        in_chans=in_chans,
        embed_dim=512,
        num_heads=8,
        drop_rate=drop_rate,
    )
    network.head = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(drop_rate), nn.Linear(512, num_classes))
    return network


@family(
    {
        "cifar/cpvt": Size(
            "CPVT for CIFAR-10, 9.5 M parameters: the trunk of `cifar/vit`, positions from one convolution.",
            *(512, 8),
            drop_rate=0.1,
        ),
        "tiny/cpvt": Size("CPVT small enough for two cores, 1.3 M parameters: 192 wide, 6 deep.", 192, 6),
    },
    paper="Chu et al. 2023, Conditional positional encodings for Vision Transformers",
    category="hybrid",
    blocks=(Blocks("blocks.*", "tokens"),),
)
def cpvt(
    embed_dim: int,
    num_heads: int,
    *,
    num_classes: int = 10,
    in_chans: int = 3,
    img_size: int = 32,
    patch_size: int = 4,
    global_pool: Pool = "token",
    drop_rate: float = 0.0,
) -> Any:
    """`global_pool: avg` averages the tokens, without a class token."""
    return _trunk(
        ConditionalViT,
        img_size=img_size,
        patch_size=patch_size,
        in_chans=in_chans,
        num_classes=num_classes,
        embed_dim=embed_dim,
        num_heads=num_heads,
        drop_rate=drop_rate,
        global_pool=global_pool,
        class_token=global_pool == "token",
    )

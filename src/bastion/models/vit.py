"""A Vision Transformer small enough for two CPU cores, with a patch embedding or a convolutional stem."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer

from bastion.models.classifier import Blocks
from bastion.models.family import SMALL, Size, family
from bastion.models.stems import ConvStem, check_patches


@family(
    {"vit/micro": Size("ViT for 32×32 images: 64 tokens, 1.2 M parameters, mean-pooled, without a class token.")},
    defaults=SMALL,
    paper="Dosovitskiy et al. 2021, An image is worth 16×16 words",
    category="Transformer",
    blocks=(Blocks("blocks.*", "tokens"),),
)
def vit_micro(
    *,
    img_size: int,
    patch_size: int = 4,
    stem: tuple[int, ...] = (),
    embed_dim: int = 128,
    depth: int = 6,
    num_heads: int = 4,
    **timm: Any,
) -> Any:
    """`stem` gives the widths of 3×3 convolutions of stride 2 that make the patches; empty: a plain patch embedding."""
    check_patches(img_size, patch_size)
    return VisionTransformer(
        img_size=img_size,
        patch_size=patch_size,
        global_pool="avg",
        class_token=False,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        embed_layer=partial(ConvStem, stem) if stem else PatchEmbed,
        **timm,
    )

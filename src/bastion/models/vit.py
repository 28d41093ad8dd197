"""Vision Transformers small enough for two cores, with a patch stem or a convolutional one."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer

from bastion.models.classifier import Blocks
from bastion.models.family import Size, family
from bastion.models.stems import ConvStem, check_patches


@family(
    {"vit/micro": Size("ViT for 32×32 images: 64 tokens, 1.2 M parameters, pooled by the mean of the tokens.")},
    paper="Dosovitskiy et al. 2021, An image is worth 16×16 words",
    category="Transformer",
    blocks=(Blocks("blocks.*", "tokens"),),
)
def vit_micro(
    *,
    num_classes: int = 10,
    in_chans: int = 3,
    img_size: int = 32,
    patch_size: int = 4,
    stem: tuple[int, ...] = (),
    embed_dim: int = 128,
    depth: int = 6,
    num_heads: int = 4,
    drop_path_rate: float = 0.0,
) -> Any:
    """`stem` gives the widths of 3×3 convolutions of stride 2 that make the patches; empty: one convolution does."""
    check_patches(img_size, patch_size)
    return VisionTransformer(
        img_size=img_size,
        patch_size=patch_size,
        in_chans=in_chans,
        num_classes=num_classes,
        global_pool="avg",
        class_token=False,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        drop_path_rate=drop_path_rate,
        embed_layer=partial(ConvStem, stem) if stem else PatchEmbed,
    )

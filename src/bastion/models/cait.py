"""CaiT (Touvron et al. 2021, Going deeper with image transformers), built from timm's class."""

from __future__ import annotations

from typing import Any

from timm.models.cait import Cait

from bastion.models.classifier import Blocks
from bastion.models.family import SMALL, Size, family
from bastion.models.stems import check_patches


@family(
    {
        "cait/s12": Size("CaiT-S12: 12 blocks of width 384, 26 M parameters.", 384, 8, 12),
        "tiny/cait": Size(
            "CaiT for 32×32 images: 64 tokens, 4 blocks of width 96, 0.7 M parameters.",
            *(96, 4, 4),
            patch_size=4,
            **SMALL,
        ),
    },
    paper="Touvron et al. 2021, Going deeper with image transformers",
    category="Transformer",
    blocks=(Blocks("blocks.*", "tokens"), Blocks("blocks_token_only.*", "class")),
)
def cait(width: int, heads: int, depth: int, *, img_size: int = 224, patch_size: int = 16, **timm: Any) -> Any:
    check_patches(img_size, patch_size)
    return Cait(
        img_size=img_size,
        patch_size=patch_size,
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        init_values=0.1,  # of LayerScale, up to depth 18 (Sec. 2.3.3 of Debenedetti 2022); his code has 1.0
        **timm,
    )

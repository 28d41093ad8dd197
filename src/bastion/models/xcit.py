"""XCiT (El-Nouby et al. 2021), attention between channels: timm's class, with smaller patches for small images."""

from __future__ import annotations

from typing import Any

from timm.models.xcit import Xcit

from bastion.models.classifier import Blocks
from bastion.models.family import SMALL, Size, family
from bastion.models.stems import patch_grid

UNSTRIDED = {16: 0, 8: 1, 4: 2, 2: 3}  # by patch size: how many of the stem's four convolutions get stride 1


def make_finer(stem: Any, patch_size: int) -> None:
    """Make the stem, which is built for patches of 16, give patches of `patch_size`, with the same weights."""
    for layer in stem[::2][: UNSTRIDED[patch_size]]:  # activations are in between
        layer[0].stride = (1, 1)


@family(
    {
        "xcit/n12": Size("XCiT-N12: 12 blocks of width 128, 3.1 M parameters.", 128, 4, 12, False),
        "xcit/s12": Size("XCiT-S12: 12 blocks of width 384, 26 M parameters.", 384, 8, 12),
        "xcit/m12": Size("XCiT-M12: 12 blocks of width 512, 46 M parameters.", 512, 8, 12),
        "xcit/l12": Size("XCiT-L12: 12 blocks of width 768, 104 M parameters.", 768, 16, 12),
        "tiny/xcit": Size(
            "XCiT for 32×32 images: 64 tokens, 4 blocks of width 96, 0.7 M parameters.",
            *(96, 4, 4),
            patch_size=4,
            **SMALL,
        ),
    },
    paper="El-Nouby et al. 2021, XCiT",
    category="hybrid",
    blocks=(Blocks("blocks.*", "channels"), Blocks("cls_attn_blocks.*", "class")),
)
def xcit(
    width: int,
    heads: int,
    depth: int,
    tokens_norm: bool = True,  # the class-attention blocks normalise all tokens
    *,
    img_size: int = 224,
    patch_size: int = 16,
    **timm: Any,
) -> Any:
    grid = patch_grid(img_size, patch_size, UNSTRIDED)
    network = Xcit(
        patch_size=16, embed_dim=width, depth=depth, num_heads=heads, eta=1.0, tokens_norm=tokens_norm, **timm
    )
    # Always the stem for patches of 16, so that weights fit every patch size: timm's stem for 8 has one layer less.
    stem = network.patch_embed
    make_finer(stem.proj, patch_size)
    stem.img_size, stem.patch_size = (img_size, img_size), (patch_size, patch_size)
    stem.grid_size, stem.num_patches = grid, grid[0] * grid[1]
    return network

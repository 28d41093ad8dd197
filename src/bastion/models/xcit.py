"""XCiT (El-Nouby et al. 2021): attention between channels, on timm's class; finer patches for small images."""

from __future__ import annotations

from typing import Any

from timm.models.xcit import Xcit

from bastion.models.classifier import Blocks
from bastion.models.family import SMALL, Size, family
from bastion.models.stems import patch_grid

UNSTRIDED = {16: 0, 8: 1, 4: 2, 2: 3}  # patch size: how many of the stem's four convolutions lose their stride


def make_finer(stem: Any, patch_size: int) -> None:
    """Patches of 16 become smaller ones, with the same weights."""
    for layer in stem[::2][: UNSTRIDED[patch_size]]:  # between them stand activations
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
    num_classes: int = 1000,
    in_chans: int = 3,
    img_size: int = 224,
    patch_size: int = 16,
    drop_path_rate: float = 0.0,
) -> Any:
    grid = patch_grid(img_size, patch_size, UNSTRIDED)
    network = Xcit(
        patch_size=16,
        in_chans=in_chans,
        num_classes=num_classes,
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        eta=1.0,
        tokens_norm=tokens_norm,
        drop_path_rate=drop_path_rate,
    )
    # Always the stem of patches of 16, so that its weights serve all sizes; timm's for 8 has a layer less.
    stem = network.patch_embed
    make_finer(stem.proj, patch_size)
    stem.img_size, stem.patch_size = (img_size, img_size), (patch_size, patch_size)
    stem.grid_size, stem.num_patches = grid, grid[0] * grid[1]
    return network

"""PVTv2 (Wang et al. 2022) for small images: overlapping patches in four stages, keys and values pooled to 7×7."""

from __future__ import annotations

from typing import Any, Literal

from timm.models.pvt_v2 import PyramidVisionTransformerV2

from bastion.models.classifier import Blocks
from bastion.models.family import SMALL, Size, family


@family(
    {
        "cifar/pvtv2": Size(
            "PVTv2-B1 with linear attention for 32×32 images, 12.4 M parameters.",
            (64, 128, 320, 512),
            patch_size=4,
        ),
        "tiny/pvtv2": Size(
            "PVTv2 with linear attention of 0.8 M parameters for 32×32 images.", (16, 32, 80, 128), patch_size=2
        ),
    },
    paper="Wang et al. 2022, PVT v2",
    category="hybrid",
    blocks=(Blocks("stages.*.blocks.*", "tokens"),),
    defaults=SMALL,
)
def pvtv2(embed_dims: tuple[int, ...], *, img_size: int, patch_size: Literal[1, 2, 4] = 4, **timm: Any) -> Any:
    """`patch_size` is the stride of the first patch embedding."""
    network = PyramidVisionTransformerV2(
        depths=(2, 2, 2, 2), embed_dims=embed_dims, num_heads=(1, 2, 5, 8), linear=True, **timm
    )
    network.patch_embed.proj.stride = (patch_size, patch_size)  # the kernel stays 7×7
    return network

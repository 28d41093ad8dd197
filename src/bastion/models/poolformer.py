"""PoolFormer (Yu et al. 2022, MetaFormer) for small images: tokens are mixed by average pooling."""

from __future__ import annotations

from typing import Any, Literal

from timm.layers import GroupNorm1, trunc_normal_
from timm.models.metaformer import MetaFormer
from torch import nn

from bastion.models.classifier import Blocks
from bastion.models.family import SMALL, Size, family


@family(
    {
        "cifar/poolformer": Size(
            "PoolFormer-S12 for 32×32 images, 11.4 M parameters.", (64, 128, 320, 512), (2, 2, 6, 2)
        ),
        "tiny/poolformer": Size("PoolFormer of 1.2 M parameters for 32×32 images.", (24, 48, 96, 192), (2, 2, 4, 2)),
    },
    paper="Yu et al. 2022, MetaFormer is actually what you need for vision",
    category="Transformer",
    blocks=(Blocks("stages.*.blocks.*"),),
    defaults=SMALL,
)
def poolformer(
    dims: tuple[int, ...],
    depths: tuple[int, ...],
    *,
    img_size: int,
    patch_size: Literal[1, 2, 4] = 2,
    **timm: Any,
) -> Any:
    """The stem is a 3×3 convolution with stride `patch_size`; which stride Tang et al. used is unknown."""
    network = MetaFormer(
        depths=depths,
        dims=dims,
        downsample_norm=None,
        mlp_act=nn.GELU,
        mlp_bias=True,
        norm_layers=GroupNorm1,
        layer_scale_init_values=1e-5,
        res_scale_init_values=None,
        use_mlp_head=False,
        **timm,
    )
    network.stem.conv = nn.Conv2d(timm["in_chans"], dims[0], 3, patch_size, padding=1)
    trunc_normal_(network.stem.conv.weight, std=0.02)
    nn.init.zeros_(network.stem.conv.bias)
    return network

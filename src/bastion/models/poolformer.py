"""PoolFormer (Yu et al. 2022, MetaFormer) for small images: tokens are mixed by pooling alone."""

from __future__ import annotations

from typing import Any, Literal

from timm.layers import GroupNorm1, trunc_normal_
from timm.models.metaformer import MetaFormer
from torch import nn

from bastion.models.classifier import Blocks
from bastion.models.family import Size, family


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
)
def poolformer(
    dims: tuple[int, ...],
    depths: tuple[int, ...],
    *,
    num_classes: int = 10,
    in_chans: int = 3,
    img_size: int = 32,
    patch_size: Literal[1, 2, 4] = 2,
    drop_path_rate: float = 0.0,
) -> Any:
    """Its stem is a 3×3 convolution whose stride is `patch_size`; which one Tang et al. took is unknown."""
    network = MetaFormer(
        in_chans,
        num_classes,
        depths=depths,
        dims=dims,
        downsample_norm=None,
        mlp_act=nn.GELU,
        mlp_bias=True,
        norm_layers=GroupNorm1,
        layer_scale_init_values=1e-5,
        res_scale_init_values=None,
        use_mlp_head=False,
        drop_path_rate=drop_path_rate,
    )
    network.stem.conv = nn.Conv2d(in_chans, dims[0], 3, patch_size, padding=1)
    trunc_normal_(network.stem.conv.weight, std=0.02)
    nn.init.zeros_(network.stem.conv.bias)
    return network

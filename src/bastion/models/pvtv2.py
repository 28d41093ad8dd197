"""PVTv2 (Wang et al. 2022) for small images: a pyramid of overlapping patches, keys and values pooled to 7×7."""

from __future__ import annotations

from typing import Literal

from timm.models.pvt_v2 import PyramidVisionTransformerV2

from bastion.models import models
from bastion.models.classifier import Backbone


def _pvtv2(
    embed_dims: tuple[int, ...],
    num_heads: tuple[int, ...],
    num_classes: int,
    in_chans: int,
    img_size: int,
    patch_size: int,
    drop_path_rate: float,
) -> Backbone:
    network = PyramidVisionTransformerV2(
        in_chans,
        num_classes,
        depths=(2, 2, 2, 2),
        embed_dims=embed_dims,
        num_heads=num_heads,
        linear=True,
        drop_path_rate=drop_path_rate,
    )
    network.patch_embed.proj.stride = (patch_size, patch_size)  # the kernel stays 7×7
    paper = "Wang et al. 2022, PVT v2"
    return Backbone(network, num_classes, (in_chans, img_size, img_size), paper=paper, attention="tokens")


@models.register("cifar/pvtv2")
def cifar_pvtv2(
    *,
    num_classes: int = 10,
    in_chans: int = 3,
    img_size: int = 32,
    patch_size: Literal[1, 2, 4] = 4,
    drop_path_rate: float = 0.0,
) -> Backbone:
    """PVTv2-B1 with linear attention for 32×32 images, 12.4 M parameters.

    `patch_size` is the stride of the first embedding.
    """
    dims, heads = (64, 128, 320, 512), (1, 2, 5, 8)
    return _pvtv2(dims, heads, num_classes, in_chans, img_size, patch_size, drop_path_rate)


@models.register("tiny/pvtv2")
def tiny_pvtv2(
    *,
    num_classes: int = 10,
    in_chans: int = 3,
    img_size: int = 32,
    patch_size: Literal[1, 2, 4] = 2,
    drop_path_rate: float = 0.0,
) -> Backbone:
    """PVTv2 with linear attention of 0.8 M parameters for 32×32 images."""
    dims, heads = (16, 32, 80, 128), (1, 2, 5, 8)
    return _pvtv2(dims, heads, num_classes, in_chans, img_size, patch_size, drop_path_rate)

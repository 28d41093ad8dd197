"""CaiT (Touvron et al. 2021, Going deeper with image transformers): talking heads and class attention, timm's class."""

from __future__ import annotations

from dataclasses import dataclass

import bastion._torchvision  # noqa: F401  (before timm)

# isort: split
from timm.models.cait import Cait

from bastion.models import models
from bastion.models.classifier import Backbone
from bastion.models.stems import check_patches


@dataclass(frozen=True)
class Size:
    width: int
    heads: int
    depth: int


def _cait(
    size: Size, num_classes: int, in_chans: int, img_size: int, patch_size: int, drop_path_rate: float
) -> Backbone:
    check_patches(img_size, patch_size)
    network = Cait(
        img_size=img_size,
        patch_size=patch_size,
        in_chans=in_chans,
        num_classes=num_classes,
        embed_dim=size.width,
        depth=size.depth,
        num_heads=size.heads,
        init_values=0.1,  # of LayerScale, up to depth 18 (Sec. 2.3.3 of Debenedetti 2022); his code has 1.0
        drop_path_rate=drop_path_rate,
    )
    shape = (in_chans, img_size, img_size)
    paper = "Touvron et al. 2021, Going deeper with image transformers"
    return Backbone(network, num_classes, shape, paper=paper, attention="tokens")


@models.register("cait/s12")
def cait_s12(
    *,
    num_classes: int = 1000,
    in_chans: int = 3,
    img_size: int = 224,
    patch_size: int = 16,
    drop_path_rate: float = 0.0,
) -> Backbone:
    """CaiT-S12: 12 blocks of width 384, 26 M parameters."""
    return _cait(Size(384, 8, 12), num_classes, in_chans, img_size, patch_size, drop_path_rate)


@models.register("tiny/cait")
def tiny_cait(
    *,
    num_classes: int = 10,
    in_chans: int = 3,
    img_size: int = 32,
    patch_size: int = 4,
    drop_path_rate: float = 0.0,
) -> Backbone:
    """CaiT for 32×32 images: 64 tokens, 4 blocks of width 96, 0.7 M parameters."""
    return _cait(Size(96, 4, 4), num_classes, in_chans, img_size, patch_size, drop_path_rate)

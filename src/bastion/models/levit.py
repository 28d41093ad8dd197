"""LeViT (Graham et al. 2021) for small images: timm's, with a finer stem."""

from __future__ import annotations

from typing import Any, Literal

from timm.models.levit import Attention, AttentionDownsample, Levit
from torch import nn

from bastion.models import models
from bastion.models.classifier import Backbone

STRIDE = 16  # of timm's stem: four convolutions of stride 2


def _levit(
    embed_dim: tuple[int, ...],
    num_heads: tuple[int, ...],
    depth: tuple[int, ...],
    num_classes: int,
    in_chans: int,
    img_size: int,
    patch_size: int,
    drop_path_rate: float,
) -> Backbone:
    if img_size < patch_size or img_size % patch_size:
        raise ValueError(f"img_size: patches of {patch_size} do not divide {img_size}")
    network = Levit(
        img_size * STRIDE // patch_size,  # sizes the tables of biases for what the finer stem makes
        in_chans,
        num_classes,
        embed_dim=embed_dim,
        key_dim=16,
        depth=depth,
        num_heads=num_heads,
        drop_path_rate=drop_path_rate,
    )
    strided = [module for module in network.stem.modules() if isinstance(module, nn.Conv2d)]
    for conv in strided[: (STRIDE // patch_size).bit_length() - 1]:
        conv.stride = (1, 1)
    for module in network.modules():
        if isinstance(module, Attention | AttentionDownsample):
            module.register_forward_hook(_forget)
    paper = "Graham et al. 2021, LeViT"
    return Backbone(network, num_classes, (in_chans, img_size, img_size), paper=paper, attention="tokens")


def _forget(module: Any, inputs: Any, output: Any) -> None:
    """In eval mode timm keeps the biases it has looked up: stale if weights change, and a copy of the model fails."""
    module.attention_bias_cache.clear()


@models.register("cifar/levit")
def cifar_levit(
    *,
    num_classes: int = 10,
    in_chans: int = 3,
    img_size: int = 32,
    patch_size: Literal[2, 4, 8, 16] = 4,
    drop_path_rate: float = 0.0,
) -> Backbone:
    """LeViT-128S without distillation for 32×32 images, 7.0 M parameters; the 6.67 M of Tang et al. are not resolved.

    The first convolutions of the stem have stride 1, so that its patches are of `patch_size`; the authors' are of 16.
    """
    dims, heads, depth = (128, 256, 384), (4, 6, 8), (2, 3, 4)
    return _levit(dims, heads, depth, num_classes, in_chans, img_size, patch_size, drop_path_rate)


@models.register("tiny/levit")
def tiny_levit(
    *,
    num_classes: int = 10,
    in_chans: int = 3,
    img_size: int = 32,
    patch_size: Literal[2, 4, 8, 16] = 4,
    drop_path_rate: float = 0.0,
) -> Backbone:
    """LeViT of 0.9 M parameters for 32×32 images."""
    dims, heads, depth = (64, 96, 128), (4, 6, 8), (2, 2, 2)
    return _levit(dims, heads, depth, num_classes, in_chans, img_size, patch_size, drop_path_rate)

"""LeViT (Graham et al. 2021) for small images: timm's class, with smaller strides in the stem."""

from __future__ import annotations

from typing import Any, Literal

from timm.models.levit import Attention, AttentionDownsample, Levit
from torch import nn

from bastion.models.classifier import Blocks
from bastion.models.family import SMALL, Size, family
from bastion.models.stems import check_patches

STRIDE = 16  # of timm's stem: four convolutions of stride 2


def _forget(module: Any, inputs: Any, output: Any) -> None:
    """Clear timm's cache of biases, which it keeps in eval mode: stale once weights change, and it breaks deepcopy."""
    module.attention_bias_cache.clear()


@family(
    {
        "cifar/levit": Size(
            "LeViT-128S without distillation for 32×32 images, 7.0 M parameters; the 6.67 M of Tang et al. are not "
            "resolved.",
            *((128, 256, 384), (4, 6, 8), (2, 3, 4)),
        ),
        "tiny/levit": Size("LeViT of 0.9 M parameters for 32×32 images.", (64, 96, 128), (4, 6, 8), (2, 2, 2)),
    },
    paper="Graham et al. 2021, LeViT",
    category="hybrid",
    blocks=(Blocks("stages.*.blocks.*", "tokens"),),
    defaults=SMALL,
)
def levit(
    embed_dim: tuple[int, ...],
    num_heads: tuple[int, ...],
    depth: tuple[int, ...],
    *,
    img_size: int,
    patch_size: Literal[2, 4, 8, 16] = 4,
    **timm: Any,
) -> Any:
    """The stem's first convolutions get stride 1, for patches of `patch_size` pixels; the authors' have 16."""
    check_patches(img_size, patch_size)
    network = Levit(
        img_size * STRIDE // patch_size,  # the size at which timm's stem would give as many tokens: for the bias tables
        embed_dim=embed_dim,
        key_dim=16,
        depth=depth,
        num_heads=num_heads,
        **timm,
    )
    strided = [module for module in network.stem.modules() if isinstance(module, nn.Conv2d)]
    for conv in strided[: (STRIDE // patch_size).bit_length() - 1]:
        conv.stride = (1, 1)
    for module in network.modules():
        if isinstance(module, Attention | AttentionDownsample):
            module.register_forward_hook(_forget)
    return network

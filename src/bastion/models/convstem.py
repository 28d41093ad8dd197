"""ViTs and ConvNeXts with the convolutional stems of Singh et al. 2023: all designs of their Tables 7, 8 and 9."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from timm.models.convnext import ConvNeXt
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from bastion.models import convnext_iso
from bastion.models.classifier import Blocks
from bastion.models.family import SMALL, Size, family
from bastion.models.stems import Layer, Stem, check_patches, total_stride

Layers = tuple[Layer, ...]
# The paper's stem for the model, a plain patch embedding, or any convolutions as [channels, kernel, stride].
Design = Literal["conv", "patch"] | Layers

SIXTEEN: Layers = ((48, 3, 2), (96, 3, 2), (192, 3, 2), (384, 3, 2))  # makes patches of 16
singh = partial(family, paper="Singh et al. 2023, Revisiting adversarial training for ImageNet")


def _layers(stem: Design, own: Layers, img_size: int) -> tuple[Layers, int]:
    """The stem's convolutions, and the patch size: their total stride. A plain patch embedding has the same size."""
    layers = own if isinstance(stem, str) else stem
    patch_size = total_stride(layers)
    check_patches(img_size, patch_size)
    return layers, patch_size


@singh(
    {
        "convstem/vit-s": Size("DeiT-S with a stem of 3×3 convolutions, 23 M parameters.", 384, 6),
        "convstem/vit-m": Size(
            "DeiT III-M with a stem of 3×3 convolutions, 40 M parameters.", 512, 8, 12, SIXTEEN, 1e-6, False
        ),
        "convstem/vit-b": Size("ViT-B with a stem of 3×3 convolutions, 87 M parameters.", 768, 12),
        "tiny/convstem-vit": Size(
            "ViT with a convolutional stem for 32×32 images: 64 tokens, 0.5 M parameters.",
            *(96, 4, 4, ((24, 3, 2), (48, 3, 2))),
            **SMALL,
        ),
    },
    category="Transformer",
    blocks=(Blocks("blocks.*", "tokens"),),
)
def vit(
    width: int,
    heads: int,
    depth: int = 12,
    own: Layers = SIXTEEN,
    layer_scale: float | None = None,  # initial value; None: blocks without LayerScale
    embed_class: bool = True,  # the class token has a position embedding
    *,
    img_size: int = 224,
    stem: Design = "conv",
    **timm: Any,
) -> Any:
    """The stem ends in a 1×1 convolution to the width."""
    layers, patch_size = _layers(stem, own, img_size)
    network = VisionTransformer(
        img_size=img_size,
        patch_size=patch_size,
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        init_values=layer_scale,
        no_embed_class=not embed_class,
        **timm,
    )
    if stem != "patch":
        network.patch_embed.proj = Stem(layers, timm["in_chans"], width)
    return network


@singh(
    {"convstem/iso-s": Size("Isotropic ConvNeXt-S with a stem of 3×3 convolutions, 23 M parameters.")},
    category="CNN",
    blocks=convnext_iso.BLOCKS,
    renames=convnext_iso.RENAMES,
)
def isotropic(*, img_size: int = 224, stem: Design = "conv", **timm: Any) -> nn.Module:
    """An isotropic ConvNeXt with the stem of the ViTs."""
    layers, patch_size = _layers(stem, SIXTEEN, img_size)
    network = convnext_iso.IsotropicConvNeXt(384, 18, img_size=img_size, patch_size=patch_size, **timm)
    if stem != "patch":
        network.stem = Stem(layers, timm["in_chans"], 384)
    return network


_TINY = ((32, 64, 128, 192), (1, 1, 3, 1), ((16, 3, 2), (32, 3, 1)))


@singh(
    {
        "convstem/convnext-t": Size(
            "ConvNeXt-T with a stem of two 3×3 convolutions, 29 M parameters.",
            *((96, 192, 384, 768), (3, 3, 9, 3), ((48, 3, 2), (96, 3, 2))),
        ),
        "convstem/convnext-s": Size(
            "ConvNeXt-S with a stem of two 3×3 convolutions, 50 M parameters.",
            *((96, 192, 384, 768), (3, 3, 27, 3), ((48, 3, 2), (96, 3, 2))),
        ),
        "convstem/convnext-b": Size(
            "ConvNeXt-B with a stem of three 3×3 convolutions, 89 M parameters.",
            *((128, 256, 512, 1024), (3, 3, 27, 3), ((64, 3, 2), (96, 3, 2), (128, 3, 1))),
        ),
        "convstem/convnext-l": Size(
            "ConvNeXt-L with a stem of three 3×3 convolutions, 198 M parameters.",
            *((192, 384, 768, 1536), (3, 3, 27, 3), ((96, 3, 2), (144, 3, 2), (192, 3, 1))),
        ),
        "tiny/convstem-convnext": Size(
            "ConvNeXt with a convolutional stem for 32×32 images, 0.9 M parameters.", *_TINY, **SMALL
        ),
        "tiny/convnext": Size(
            "ConvNeXt with patches of 2 for 32×32 images, 0.9 M parameters.", *_TINY, stem="patch", **SMALL
        ),
    },
    category="CNN",
    blocks=(Blocks("stages.*.blocks.*"),),
)
def convnext(
    widths: tuple[int, int, int, int],
    depths: tuple[int, int, int, int],
    own: Layers,
    *,
    img_size: int = 224,
    stem: Design = "conv",
    **timm: Any,
) -> Any:
    """The last convolution of the stem must have the width of the first stage."""
    layers, patch_size = _layers(stem, own, img_size)
    if img_size < 8 * patch_size:
        raise ValueError(
            f"img_size: the stages halve the stem's map three times, so it needs {8 * patch_size} pixels or more, "
            f"got {img_size}"
        )
    network = ConvNeXt(dims=widths, depths=depths, **timm)
    if patch_size != 4:  # timm's `patch_size` would change the strides of the stages too
        network.stem[0] = nn.Conv2d(timm["in_chans"], widths[0], patch_size, patch_size)
    if stem == "patch":
        return network
    if layers[-1][0] != widths[0]:
        raise ValueError(f"stem: the last convolution needs {widths[0]} channels here, got {layers[-1][0]}")
    network.stem = Stem(layers, timm["in_chans"])
    return network

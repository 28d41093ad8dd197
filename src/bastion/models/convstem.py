"""ViTs and ConvNeXts with the convolutional stems of Singh et al. 2023, every design of their Tables 7, 8 and 9."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from timm.models.convnext import ConvNeXt
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from bastion.models import convnext_iso, models
from bastion.models.classifier import Attention, Backbone
from bastion.models.stems import Layer, Stem, check_patches, total_stride

Layers = tuple[Layer, ...]
Renames = tuple[tuple[str, str], ...]
# The paper's convolutions for the model, one convolution over patches, or others as [channels, kernel, stride].
Design = Literal["conv", "patch"] | Layers

PAPER = "Singh et al. 2023, Revisiting adversarial training for ImageNet"


@dataclass(frozen=True)
class ViT:
    """Its stem ends in a 1×1 convolution to the width."""

    width: int
    heads: int
    depth: int = 12
    stem: Layers = ((48, 3, 2), (96, 3, 2), (192, 3, 2), (384, 3, 2))
    layer_scale: float | None = None  # what it starts with; none: the blocks have no such gain
    embed_class: bool = True  # the class token has a position
    attention: ClassVar[Attention] = "tokens"
    renames: ClassVar[Renames] = ()

    def build(self, img_size: int, patch_size: int, **options: Any) -> Any:
        return VisionTransformer(
            img_size=img_size,
            patch_size=patch_size,
            embed_dim=self.width,
            depth=self.depth,
            num_heads=self.heads,
            init_values=self.layer_scale,
            no_embed_class=not self.embed_class,
            **options,
        )

    def attach(self, network: Any, layers: Layers, in_chans: int) -> None:
        network.patch_embed.proj = Stem(layers, in_chans, self.width)


@dataclass(frozen=True)
class Isotropic:
    """A ConvNeXt on one grid, with the stem of a ViT."""

    size: convnext_iso.Isotropic = convnext_iso.SIZES["s"]
    stem: Layers = ViT.stem
    attention: ClassVar[None] = None
    renames: ClassVar[Renames] = convnext_iso.RENAMES

    def build(self, img_size: int, patch_size: int, **options: Any) -> Any:
        return convnext_iso.IsotropicConvNeXt(self.size, patch_size=patch_size, **options)

    def attach(self, network: Any, layers: Layers, in_chans: int) -> None:
        network.stem = Stem(layers, in_chans, self.size.width)


@dataclass(frozen=True)
class Pyramid:
    """A ConvNeXt of four stages; its stem ends in the width of the first."""

    widths: tuple[int, int, int, int]
    depths: tuple[int, int, int, int]
    stem: Layers
    attention: ClassVar[None] = None
    renames: ClassVar[Renames] = ()

    def build(self, img_size: int, patch_size: int, **options: Any) -> Any:
        if img_size < 8 * patch_size:
            raise ValueError(
                f"img_size: the stages halve the stem's map three times, so it needs {8 * patch_size} pixels or more, "
                f"got {img_size}"
            )
        network = ConvNeXt(dims=self.widths, depths=self.depths, **options)
        if patch_size != 4:  # given to timm, it would change the stages too
            network.stem[0] = nn.Conv2d(options["in_chans"], self.widths[0], patch_size, patch_size)
        return network

    def attach(self, network: Any, layers: Layers, in_chans: int) -> None:
        if layers[-1][0] != self.widths[0]:
            raise ValueError(f"stem: the last convolution needs {self.widths[0]} channels here, got {layers[-1][0]}")
        network.stem = Stem(layers, in_chans)


def _register(
    name: str,
    body: ViT | Isotropic | Pyramid,
    about: str,
    *,
    classes: int = 1000,
    size: int = 224,
    own: Design = "conv",
) -> None:
    @models.register(name)
    def convstem(
        *,
        num_classes: int = classes,
        in_chans: int = 3,
        img_size: int = size,
        stem: Design = own,
        drop_path_rate: float = 0.0,
    ) -> Backbone:
        layers = body.stem if isinstance(stem, str) else stem
        patch_size = total_stride(layers)
        check_patches(img_size, patch_size)
        network = body.build(
            img_size, patch_size, num_classes=num_classes, in_chans=in_chans, drop_path_rate=drop_path_rate
        )
        if stem != "patch":
            body.attach(network, layers, in_chans)
        shape = (in_chans, img_size, img_size)
        return Backbone(network, num_classes, shape, paper=PAPER, attention=body.attention, renames=body.renames)

    convstem.__doc__ = about


_register("convstem/vit-s", ViT(384, 6), "DeiT-S with a stem of 3×3 convolutions, 23 M parameters.")
_register(
    "convstem/vit-m",
    ViT(512, 8, layer_scale=1e-6, embed_class=False),
    "DeiT III-M with a stem of 3×3 convolutions, 40 M parameters.",
)
_register("convstem/vit-b", ViT(768, 12), "ViT-B with a stem of 3×3 convolutions, 87 M parameters.")
_register("convstem/iso-s", Isotropic(), "Isotropic ConvNeXt-S with a stem of 3×3 convolutions, 23 M parameters.")
_register(
    "convstem/convnext-t",
    Pyramid((96, 192, 384, 768), (3, 3, 9, 3), ((48, 3, 2), (96, 3, 2))),
    "ConvNeXt-T with a stem of two 3×3 convolutions, 29 M parameters.",
)
_register(
    "convstem/convnext-s",
    Pyramid((96, 192, 384, 768), (3, 3, 27, 3), ((48, 3, 2), (96, 3, 2))),
    "ConvNeXt-S with a stem of two 3×3 convolutions, 50 M parameters.",
)
_register(
    "convstem/convnext-b",
    Pyramid((128, 256, 512, 1024), (3, 3, 27, 3), ((64, 3, 2), (96, 3, 2), (128, 3, 1))),
    "ConvNeXt-B with a stem of three 3×3 convolutions, 89 M parameters.",
)
_register(
    "convstem/convnext-l",
    Pyramid((192, 384, 768, 1536), (3, 3, 27, 3), ((96, 3, 2), (144, 3, 2), (192, 3, 1))),
    "ConvNeXt-L with a stem of three 3×3 convolutions, 198 M parameters.",
)

_TINY_VIT = ViT(96, 4, depth=4, stem=((24, 3, 2), (48, 3, 2)))
_TINY_CONVNEXT = Pyramid((32, 64, 128, 192), (1, 1, 3, 1), ((16, 3, 2), (32, 3, 1)))
_register(
    "tiny/convstem-vit",
    _TINY_VIT,
    "ViT with a convolutional stem for 32×32 images: 64 tokens, 0.5 M parameters.",
    classes=10,
    size=32,
)
_register(
    "tiny/convstem-convnext",
    _TINY_CONVNEXT,
    "ConvNeXt with a convolutional stem for 32×32 images, 0.9 M parameters.",
    classes=10,
    size=32,
)
_register(
    "tiny/convnext",
    _TINY_CONVNEXT,
    "ConvNeXt with patches of 2 for 32×32 images, 0.9 M parameters.",
    classes=10,
    size=32,
    own="patch",
)

"""XCiT (El-Nouby et al. 2021): attention between channels, on timm's class; finer patches for small images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from timm.models.xcit import Xcit

from bastion.models import models
from bastion.models.classifier import Backbone
from bastion.models.stems import patch_grid

UNSTRIDED = {16: 0, 8: 1, 4: 2, 2: 3}  # patch size: how many of the stem's four convolutions lose their stride


@dataclass(frozen=True)
class Size:
    width: int
    heads: int
    depth: int = 12
    tokens_norm: bool = True  # the class-attention blocks normalise all tokens


def make_finer(stem: Any, patch_size: int) -> None:
    """Patches of 16 become smaller ones, with the same weights."""
    for layer in stem[::2][: UNSTRIDED[patch_size]]:  # between them stand activations
        layer[0].stride = (1, 1)


def _xcit(
    size: Size, num_classes: int, in_chans: int, img_size: int, patch_size: int, drop_path_rate: float
) -> Backbone:
    grid = patch_grid(img_size, patch_size, UNSTRIDED)
    network = Xcit(
        patch_size=16,
        in_chans=in_chans,
        num_classes=num_classes,
        embed_dim=size.width,
        depth=size.depth,
        num_heads=size.heads,
        eta=1.0,
        tokens_norm=size.tokens_norm,
        drop_path_rate=drop_path_rate,
    )
    # Always the stem of patches of 16, so that its weights serve all sizes; timm's for 8 has a layer less.
    stem = network.patch_embed
    make_finer(stem.proj, patch_size)
    stem.img_size, stem.patch_size = (img_size, img_size), (patch_size, patch_size)
    stem.grid_size, stem.num_patches = grid, grid[0] * grid[1]
    shape = (in_chans, img_size, img_size)
    return Backbone(network, num_classes, shape, paper="El-Nouby et al. 2021, XCiT", attention="channels")


def _register(name: str, size: Size, about: str) -> None:
    @models.register(f"xcit/{name}")
    def xcit(
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int = 224,
        patch_size: int = 16,
        drop_path_rate: float = 0.0,
    ) -> Backbone:
        return _xcit(size, num_classes, in_chans, img_size, patch_size, drop_path_rate)

    xcit.__doc__ = f"XCiT-{name.upper()}: {size.depth} blocks of width {size.width}, {about} parameters."


_register("n12", Size(128, 4, tokens_norm=False), "3.1 M")
_register("s12", Size(384, 8), "26 M")
_register("m12", Size(512, 8), "46 M")
_register("l12", Size(768, 16), "104 M")


@models.register("tiny/xcit")
def tiny_xcit(
    *,
    num_classes: int = 10,
    in_chans: int = 3,
    img_size: int = 32,
    patch_size: int = 4,
    drop_path_rate: float = 0.0,
) -> Backbone:
    """XCiT for 32×32 images: 64 tokens, 4 blocks of width 96, 0.7 M parameters."""
    return _xcit(Size(96, 4, depth=4), num_classes, in_chans, img_size, patch_size, drop_path_rate)

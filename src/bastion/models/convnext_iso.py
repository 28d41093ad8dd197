"""Isotropic ConvNeXts (Sec. 3.3 of Liu et al. 2022, A ConvNet for the 2020s): blocks on one grid, as in a ViT."""

from __future__ import annotations

from dataclasses import dataclass

from timm.layers import calculate_drop_path_rates
from timm.models.convnext import ConvNeXtBlock
from torch import Tensor, nn

from bastion.models import models
from bastion.models.classifier import Backbone
from bastion.models.initial import truncated
from bastion.models.stems import check_patches

# The authors' names of what timm's block has.
RENAMES = ((r"(.*)\.dwconv\.(.*)", r"\1.conv_dw.\2"), (r"(.*)\.pwconv([12])\.(.*)", r"\1.mlp.fc\2.\3"))


@dataclass(frozen=True)
class Isotropic:
    width: int
    depth: int
    layer_scale: float | None = None  # what it starts with; none: the blocks have no such gain


SIZES = {"s": Isotropic(384, 18), "b": Isotropic(768, 18), "l": Isotropic(1024, 36, layer_scale=1e-6)}


class IsotropicConvNeXt(nn.Module):
    """One convolution makes patches, all blocks keep the grid, the mean over it is classified."""

    def __init__(
        self, size: Isotropic, *, num_classes: int, in_chans: int, patch_size: int, drop_path_rate: float
    ) -> None:
        super().__init__()
        self.stem: nn.Module = nn.Conv2d(in_chans, size.width, patch_size, patch_size)
        rates = calculate_drop_path_rates(drop_path_rate, size.depth)
        self.blocks = nn.Sequential(
            *(ConvNeXtBlock(size.width, ls_init_value=size.layer_scale, drop_path=rate) for rate in rates)
        )
        self.norm = nn.LayerNorm(size.width, eps=1e-6)
        self.head = nn.Linear(size.width, num_classes)
        self.apply(truncated)

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.blocks(self.stem(x))  # (B, C, H, W)
        logits: Tensor = self.head(self.norm(maps.mean(dim=(2, 3))))
        return logits


def _register(name: str, size: Isotropic) -> None:
    @models.register(f"convnext-iso/{name}")
    def convnext_iso(
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int = 224,
        patch_size: int = 16,
        drop_path_rate: float = 0.0,
    ) -> Backbone:
        check_patches(img_size, patch_size)
        network = IsotropicConvNeXt(
            size, num_classes=num_classes, in_chans=in_chans, patch_size=patch_size, drop_path_rate=drop_path_rate
        )
        shape = (in_chans, img_size, img_size)
        return Backbone(network, num_classes, shape, paper="Liu et al. 2022, A ConvNet for the 2020s", renames=RENAMES)

    convnext_iso.__doc__ = f"Isotropic ConvNeXt-{name.upper()}: {size.depth} blocks of width {size.width} on one grid."


for _name, _size in SIZES.items():
    _register(_name, _size)

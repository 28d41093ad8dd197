"""Isotropic ConvNeXts (Sec. 3.3 of Liu et al. 2022, A ConvNet for the 2020s): all blocks on one grid, as in a ViT."""

from __future__ import annotations

from timm.layers import calculate_drop_path_rates
from timm.models.convnext import ConvNeXtBlock
from torch import Tensor, nn

from bastion.models.classifier import Blocks
from bastion.models.family import Size, family
from bastion.models.initial import truncated
from bastion.models.stems import check_patches

BLOCKS = (Blocks("blocks.*"),)
# Names of the authors' code to names of timm's block.
RENAMES = ((r"(.*)\.dwconv\.(.*)", r"\1.conv_dw.\2"), (r"(.*)\.pwconv([12])\.(.*)", r"\1.mlp.fc\2.\3"))


@family(
    {
        "convnext-iso/s": Size("Isotropic ConvNeXt-S: 18 blocks of width 384 on one grid.", 384, 18),
        "convnext-iso/b": Size("Isotropic ConvNeXt-B: 18 blocks of width 768 on one grid.", 768, 18),
        "convnext-iso/l": Size("Isotropic ConvNeXt-L: 36 blocks of width 1024 on one grid.", 1024, 36, 1e-6),
    },
    paper="Liu et al. 2022, A ConvNet for the 2020s",
    category="CNN",
    blocks=BLOCKS,
    renames=RENAMES,
)
class IsotropicConvNeXt(nn.Module):
    """A patch embedding, ConvNeXt blocks on its grid, mean pooling and a linear head."""

    def __init__(
        self,
        width: int,
        depth: int,
        layer_scale: float | None = None,  # initial value; None: blocks without LayerScale
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int = 224,
        patch_size: int = 16,
        drop_path_rate: float = 0.0,
    ) -> None:
        check_patches(img_size, patch_size)
        super().__init__()
        self.stem: nn.Module = nn.Conv2d(in_chans, width, patch_size, patch_size)
        rates = calculate_drop_path_rates(drop_path_rate, depth)
        self.blocks = nn.Sequential(
            *(ConvNeXtBlock(width, ls_init_value=layer_scale, drop_path=rate) for rate in rates)
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)
        self.apply(truncated)

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.blocks(self.stem(x))  # (B, C, H, W)
        logits: Tensor = self.head(self.norm(maps.mean(dim=(2, 3))))
        return logits

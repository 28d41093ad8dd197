"""Wide ResNets (Zagoruyko and Komodakis 2016): pre-activation ResNets of three stages, wide rather than deep."""

from __future__ import annotations

from functools import partial

from torch import nn

from bastion.models.family import Size, family
from bastion.models.preact import BLOCKS, RENAMES, PreActBlock, PreActResNet


@family(
    {
        "cifar/wrn": Size(
            "WRN-40-10 for 32×32 images, 55.9 M parameters: convolutions with bias, dropout in the blocks.",
            *(40, 10, True),
            drop_rate=0.5,
        ),
        "cifar/wrn-28-10": Size("WRN-28-10 for 32×32 images, 36.5 M parameters.", 28, 10),
        "cifar/wrn-34-10": Size("WRN-34-10 for 32×32 images, 46.2 M parameters.", 34, 10),
    },
    paper="Zagoruyko and Komodakis 2016, Wide residual networks",
    category="CNN",
    blocks=BLOCKS,
    renames=RENAMES,
)
def wide_resnet(
    depth: int,
    widen: int,
    bias: bool = False,
    *,
    num_classes: int = 10,
    in_chans: int = 3,
    img_size: int = 32,
    drop_rate: float = 0.0,
) -> nn.Module:
    """WRN-depth-widen: three stages of (depth - 4) / 6 blocks."""
    widths = (16 * widen, 32 * widen, 64 * widen)
    network = PreActResNet(
        widths,
        ((depth - 4) // 6,) * 3,
        num_classes,
        in_chans,
        stem_width=16,
        stem_bias=bias,
        block=partial(PreActBlock, bias=bias, drop_rate=drop_rate),
    )
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return network

"""Stems: how an image becomes tokens. A convolutional stem makes adversarial training better (Singh et al. 2023)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of an image, (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvStem(nn.Module):
    """In the place of a patch embedding: 3×3 convolutions of stride 2, each with LayerNorm and GELU, then one of 1×1.

    Has the constructor and the attributes that timm's `VisionTransformer` expects of an `embed_layer`.
    """

    def __init__(
        self,
        widths: tuple[int, ...],
        *,
        img_size: int,
        in_chans: int,
        embed_dim: int,
        patch_size: int,
        **_: Any,
    ) -> None:
        super().__init__()
        stride = 2 ** len(widths)
        if stride != patch_size:
            raise ValueError(f"{len(widths)} convolutions of stride 2 make patches of {stride}, not {patch_size}")
        self.patch_size = (stride, stride)
        self.grid_size = (img_size // stride, img_size // stride)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        layers: list[nn.Module] = []
        for before, after in pairwise((in_chans, *widths)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), ChannelNorm(after), nn.GELU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], embed_dim, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.flatten(self.layers(x), 2).transpose(1, 2)  # (B, N, D)

"""Stems, which turn an image into tokens, and the checks and reshaping that families share."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Layer = tuple[int, int, int]  # channels, kernel, stride
GridShape = Sequence[int]  # rows and columns of tokens


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of an image, (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Stem(nn.Module):
    """Convolutions, each with LayerNorm and GELU; for a transformer, then a 1×1 convolution to its width."""

    def __init__(self, layers: Sequence[Layer], in_chans: int, width: int | None = None, *, eps: float = 1e-6) -> None:
        super().__init__()
        stem: list[nn.Module] = []
        in_chs = in_chans
        for channels, kernel, stride in layers:
            convolution = nn.Conv2d(in_chs, channels, kernel, stride, padding=kernel // 2)
            stem += [convolution, ChannelNorm(channels, eps=eps), nn.GELU()]
            in_chs = channels
        if width is not None:
            stem.append(nn.Conv2d(in_chs, width, 1))
        self.stem = nn.Sequential(*stem)  # named as in the authors' checkpoints

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.stem(x)
        return maps


class ConvStem(nn.Module):
    """A patch embedding of 3×3 convolutions of stride 2, each with LayerNorm and GELU, and a 1×1 convolution.

    Its constructor and attributes are those that timm's `VisionTransformer` expects of an `embed_layer`.
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
        self.layers = Stem([(width, 3, 2) for width in widths], in_chans, embed_dim, eps=1e-5).stem

    def forward(self, x: Tensor) -> Tensor:
        return torch.flatten(self.layers(x), 2).transpose(1, 2)  # (B, N, D)


def total_stride(layers: Sequence[Layer]) -> int:
    """The product of the strides, which is the patch size; an error for layers that are not valid."""
    if not layers:
        raise ValueError("stem: expected one convolution or more, got none")
    for layer in layers:
        if min(layer) < 1 or layer[1] % 2 == 0:
            raise ValueError(
                f"stem: expected positive [channels, kernel, stride] with an odd kernel, got {list(layer)}"
            )
    return math.prod(stride for _, _, stride in layers)


def check_patches(img_size: int, patch_size: int) -> None:
    if patch_size < 1 or img_size < 1 or img_size % patch_size:
        raise ValueError(
            f"img_size: {img_size} cannot be cut into patches of {patch_size}; set a patch_size that divides it"
        )


def patch_grid(img_size: int, patch_size: int, known: Collection[int]) -> tuple[int, int]:
    """Rows and columns of patches; an error for a patch size not in `known`, or that does not divide the image size."""
    if patch_size not in known:
        raise ValueError(f"patch_size: expected one of {sorted(known)}, got {patch_size}")
    check_patches(img_size, patch_size)
    return img_size // patch_size, img_size // patch_size


def as_image(x: Tensor, grid: GridShape) -> Tensor:
    return x.transpose(1, 2).reshape(len(x), x.shape[2], *grid)  # (B, N, d) to (B, d, H, W)


def as_tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)  # (B, d, H, W) to (B, N, d)

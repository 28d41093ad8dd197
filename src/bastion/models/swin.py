"""Swin (Liu et al. 2021) for small images: attention in windows, shifted by half a window in every other block.

As in berniwal's code: patch merging with bias and without a norm, one table of relative biases for all heads, and
masked shifts also where one window covers the whole feature map.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timm.layers import DropPath, Mlp
from torch import Tensor, nn

from bastion.models.classifier import Blocks
from bastion.models.family import Size, family


@dataclass(frozen=True)
class Stage:
    width: int
    depth: int
    heads: int
    merge: int  # side of the patches that are merged into a token


class Merge(nn.Module):
    """Patch merging: (B, H, W, C) to (B, H/f, W/f, D); the values of a patch are in the order of `nn.Unfold`."""

    def __init__(self, in_chs: int, out_chs: int, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.linear = nn.Linear(in_chs * factor**2, out_chs)

    def forward(self, x: Tensor) -> Tensor:
        merged: Tensor = self.linear(_tiles(x, self.factor).permute(0, 1, 3, 5, 2, 4).flatten(3))
        return merged


class WindowAttention(nn.Module):
    index: Tensor
    mask: Tensor | None

    def __init__(self, stage: Stage, side: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = stage.heads, window, shift
        self.qkv = nn.Linear(stage.width, 3 * stage.width, bias=False)
        self.table = nn.Parameter(torch.randn(2 * window - 1, 2 * window - 1))  # biases by relative (row, column)
        self.proj = nn.Linear(stage.width, stage.width)
        self.register_buffer("index", _offsets(window), persistent=False)
        self.register_buffer("mask", _wrapped(side, window, shift) if shift else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.roll((-self.shift, -self.shift), (1, 2))
        qkv = self.qkv(_windows(x, self.window)).unflatten(2, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B · windows, heads, n, d)
        bias = self.table.flatten()[self.index]  # (n, n) for the n tokens of a window
        if self.mask is not None:
            bias = (bias + self.mask).repeat(len(x), 1, 1)[:, None]  # (B · windows, 1, n, n)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        mixed = _joined(self.proj(mixed.transpose(1, 2).flatten(2)), x.shape)
        return mixed.roll((self.shift, self.shift), (1, 2))


class SwinBlock(nn.Module):
    def __init__(self, stage: Stage, side: int, window: int, shift: int, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(stage.width)
        self.attn = WindowAttention(stage, side, window, shift)
        self.drop_path = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(stage.width)
        self.mlp = Mlp(stage.width, 4 * stage.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        out: Tensor = x + self.drop_path(self.mlp(self.norm2(x)))
        return out


@family(
    {
        "cifar/swin": Size(
            "Swin-T for 32×32 images, 27.4 M parameters, with windows of 4×4 on maps of 16, 16, 8 and 4.",
            (Stage(96, 2, 3, 2), Stage(192, 2, 6, 1), Stage(384, 6, 12, 2), Stage(768, 2, 24, 2)),
        ),
        "tiny/swin": Size(
            "Swin of 1.0 M parameters for 32×32 images, with windows of 4×4 on maps of 16, 8 and 4.",
            (Stage(32, 2, 2, 2), Stage(64, 2, 4, 2), Stage(128, 4, 8, 2)),
        ),
    },
    paper="Liu et al. 2021, Swin transformer",
    category="Transformer",
    blocks=(Blocks("layers.*", "windows", having="attn"),),
)
class Swin(nn.Module):
    def __init__(
        self,
        stages: tuple[Stage, ...],
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: int = 32,
        window_size: int = 4,
        drop_path_rate: float = 0.0,
    ) -> None:
        window = window_size
        if window < 2:
            raise ValueError(f"window_size: must be 2 or more, got {window}")
        super().__init__()
        total = sum(stage.depth for stage in stages)
        rates = iter(torch.linspace(0, drop_path_rate, total, device="cpu").tolist())
        in_chs, side = in_chans, img_size
        parts: list[nn.Module] = []
        for number, stage in enumerate(stages, 1):
            if side % (stage.merge * window):
                raise ValueError(
                    f"img_size: {img_size} leaves stage {number} a side of {side / stage.merge:g}, "
                    f"which windows of {window} do not divide"
                )
            side //= stage.merge
            parts.append(Merge(in_chs, stage.width, stage.merge))
            for index in range(stage.depth):
                shift = window // 2 if index % 2 else 0
                parts.append(SwinBlock(stage, side, window, shift, next(rates)))
            in_chs = stage.width
        self.layers = nn.Sequential(*parts)
        self.norm = nn.LayerNorm(in_chs)
        self.head = nn.Linear(in_chs, num_classes)

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith("attn.table")}

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x.permute(0, 2, 3, 1)).mean(dim=(1, 2))
        logits: Tensor = self.head(self.norm(x))
        return logits


def _tiles(x: Tensor, side: int) -> Tensor:
    """(B, H, W, C) to (B, H/side, side, W/side, side, C)."""
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // side, side, width // side, side, channels)


def _windows(x: Tensor, window: int) -> Tensor:
    """(B, H, W, C) to (B · windows, n, C)."""
    return _tiles(x, window).transpose(2, 3).flatten(3, 4).flatten(0, 2)


def _joined(x: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_windows`, to a feature map of this shape."""
    window = math.isqrt(x.shape[1])
    batch, height, width, channels = shape
    x = x.reshape(batch, height // window, width // window, window, window, channels)
    return x.transpose(2, 3).reshape(shape)


def _offsets(window: int) -> Tensor:
    """(n, n): the entry of the flattened table for each query and key."""
    place = torch.arange(window)
    apart = place[None] - place[:, None] + window - 1  # (query, key) along one axis
    rows, columns = apart[:, None, :, None], apart[None, :, None, :]
    return (rows * (2 * window - 1) + columns).flatten(2).flatten(0, 1)


def _wrapped(side: int, window: int, shift: int) -> Tensor:
    """(windows, n, n): -∞ between tokens that are in one window only because the map was rolled."""
    region = torch.zeros(side)
    region[-shift:] = 1  # rolled over from the other end
    regions = _windows((region[:, None] + 2 * region)[None, :, :, None], window)  # (windows, n, 1)
    together = regions == regions.transpose(1, 2)
    return torch.zeros(together.shape).masked_fill(~together, -torch.inf)

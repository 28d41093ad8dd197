"""Pyramid Vision Transformer (Wang et al. 2021): four stages on smaller and smaller grids, keys and values downsampled.

timm has only the second version, as `timm/pvt_v2_*`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timm.layers import DropPath, Mlp, trunc_normal_
from torch import Tensor, nn

from bastion.models.classifier import Blocks
from bastion.models.family import SMALL, Size, family
from bastion.models.initial import truncated_linear
from bastion.models.stems import as_image, as_tokens

EPS = 1e-6


@dataclass(frozen=True)
class Stage:
    width: int
    depth: int
    heads: int
    mlp_ratio: int
    reduction: int  # by which keys and values are downsampled
    patch: int  # patch size, in tokens of the previous stage


def _pyramid(depths: tuple[int, ...]) -> tuple[Stage, ...]:
    rows = zip((64, 128, 320, 512), depths, (1, 2, 5, 8), (8, 8, 4, 4), (8, 4, 2, 1), (4, 2, 2, 2), strict=True)
    return tuple(Stage(*row) for row in rows)


class ReducedAttention(nn.Module):
    """Attention whose keys and values are downsampled by a convolution of stride `reduction`."""

    def __init__(self, dim: int, heads: int, reduction: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.sr = nn.Conv2d(dim, dim, reduction, reduction) if reduction > 1 else None
        self.norm = nn.LayerNorm(dim) if reduction > 1 else None
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        q = self.q(x).unflatten(2, (self.heads, -1)).transpose(1, 2)  # (B, heads, N, d)
        if self.sr is not None and self.norm is not None:
            x = self.norm(as_tokens(self.sr(as_image(x, grid))))
        k, v = self.kv(x).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return mixed


class PyramidBlock(nn.Module):
    def __init__(self, stage: Stage, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(stage.width, EPS)
        self.attn = ReducedAttention(stage.width, stage.heads, stage.reduction)
        self.drop_path = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(stage.width, EPS)
        self.mlp = Mlp(stage.width, stage.width * stage.mlp_ratio)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x), grid))
        out: Tensor = x + self.drop_path(self.mlp(self.norm2(x)))
        return out


class Patches(nn.Module):
    def __init__(self, in_chs: int, out_chs: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chs, out_chs, patch, patch)
        self.norm = nn.LayerNorm(out_chs)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        x = self.proj(x)
        return self.norm(as_tokens(x)), (x.shape[2], x.shape[3])


class PyramidStage(nn.Module):
    """Patch embedding, position embeddings and blocks; the last stage also has the class token."""

    def __init__(self, stage: Stage, in_chs: int, side: int, rates: list[float], class_token: bool) -> None:
        super().__init__()
        self.patch_embed = Patches(in_chs, stage.width, stage.patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, stage.width)) if class_token else None
        self.pos_embed = nn.Parameter(torch.zeros(1, side * side + class_token, stage.width))
        self.blocks = nn.ModuleList(PyramidBlock(stage, rate) for rate in rates)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        x, grid = self.patch_embed(x)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        if x.shape[1] != self.pos_embed.shape[1]:
            raise ValueError(f"position embeddings are of {self.pos_embed.shape[1]} tokens, the image has {x.shape[1]}")
        x = x + self.pos_embed
        for block in self.blocks:
            x = block(x, grid)
        return x, grid


@family(
    {
        "pvt/ti": Size("PVT-Tiny.", _pyramid((2, 2, 2, 2))),
        "pvt/s": Size("PVT-Small.", _pyramid((3, 4, 6, 3))),
        "pvt/m": Size("PVT-Medium.", _pyramid((3, 4, 18, 3))),
        "pvt/l": Size("PVT-Large.", _pyramid((3, 8, 27, 3))),
        "tiny/pvt": Size(
            "PVT for 32×32 images: grids of 16, 8, 4 and 2, 0.8 M parameters.",
            (Stage(32, 1, 1, 4, 8, 2), Stage(64, 1, 2, 4, 4, 2), Stage(96, 2, 3, 4, 2, 2), Stage(128, 1, 4, 4, 1, 2)),
            **SMALL,
        ),
    },
    paper="Wang et al. 2021, Pyramid Vision Transformer",
    category="Transformer",
    blocks=(Blocks("stages.*.blocks.*", "tokens"),),
    renames=(
        (r"patch_embed(\d)\.(.+)", lambda m: f"stages.{int(m[1]) - 1}.patch_embed.{m[2]}"),
        (r"pos_embed(\d)", lambda m: f"stages.{int(m[1]) - 1}.pos_embed"),
        (r"block(\d)\.(.+)", lambda m: f"stages.{int(m[1]) - 1}.blocks.{m[2]}"),
        (r"cls_token", r"stages.3.cls_token"),
    ),
)
class PVT(nn.Module):
    def __init__(
        self,
        stages: tuple[Stage, ...],
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int = 224,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        rates = torch.linspace(0, drop_path_rate, sum(stage.depth for stage in stages), device="cpu").tolist()
        in_chs, side = in_chans, img_size
        made = []
        for stage in stages:
            if side % stage.patch or (side // stage.patch) % stage.reduction:
                raise ValueError(f"img_size: {img_size} does not divide into the patches of all four stages; use 32 n")
            side //= stage.patch
            depth_rates, rates = rates[: stage.depth], rates[stage.depth :]
            made.append(PyramidStage(stage, in_chs, side, depth_rates, class_token=stage is stages[-1]))
            in_chs = stage.width
        self.stages = nn.ModuleList(made)
        self.norm = nn.LayerNorm(in_chs, EPS)
        self.head = nn.Linear(in_chs, num_classes)
        self.apply(_initialise)

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith(("pos_embed", "cls_token"))}

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages[:-1]:
            x, grid = stage(x)
            x = as_image(x, grid)
        x, _ = self.stages[-1](x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits


def _initialise(module: nn.Module) -> None:
    truncated_linear(module)
    if isinstance(module, PyramidStage):
        trunc_normal_(module.pos_embed, std=0.02)
        if module.cls_token is not None:
            trunc_normal_(module.cls_token, std=0.02)

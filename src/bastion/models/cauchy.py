"""ViT and CoViT of Wang and Ruan 2022 (robustness of ViTs as a Cauchy problem): attention, or convolutions instead.

All but the mixer of tokens is the same in both, so they tell what self-attention adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timm.layers import Mlp, PatchEmbed
from torch import Tensor, nn

from bastion.models import models
from bastion.models.classifier import Backbone
from bastion.models.stems import check_patches

PAPER = "Wang and Ruan 2022, Understanding adversarial robustness of vision transformers via Cauchy problem"
RENAMES = (
    (r"0\.cls", "cls_token"),
    (r"0\.pos", "pos_embed"),
    (r"0\.projection\.0\.(.*)", r"patch_embed.proj.\1"),
    (r"1\.(\d+)\.0\.fn\.0\.(.*)", r"blocks.\1.norm1.\2"),
    (r"1\.(\d+)\.0\.fn\.1\.(.*)", r"blocks.\1.mixer.\2"),
    (r"1\.(\d+)\.1\.fn\.0\.(.*)", r"blocks.\1.norm2.\2"),
    (r"1\.(\d+)\.1\.fn\.1\.0\.(.*)", r"blocks.\1.mlp.fc1.\2"),
    (r"1\.(\d+)\.1\.fn\.1\.3\.(.*)", r"blocks.\1.mlp.fc2.\2"),
    (r"2\.1\.(.*)", r"norm.\1"),
    (r"2\.2\.(.*)", r"head.\1"),
)


class Attention(nn.Module):
    """Multi-head self-attention; one projection makes queries and keys, of which every second number is a key's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qk = nn.Linear(width, 2 * width)
        self.v = nn.Linear(width, width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).unflatten(2, (self.heads, -1, 2)).transpose(1, 2).unbind(-1)  # (B, heads, N, D / heads)
        v = self.v(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v)
        projected: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return projected


class TokenConvolutions(nn.Module):
    """Groups of channels, each with its own convolution along the tokens: the class token, then row by row."""

    def __init__(self, width: int, kernels: tuple[int, ...]) -> None:
        super().__init__()
        group = width // len(kernels)
        self.conv1d_list = nn.ModuleList(nn.Conv1d(group, group, kernel, padding=kernel // 2) for kernel in kernels)
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        groups = x.transpose(1, 2).chunk(len(self.conv1d_list), dim=1)  # (B, D / groups, N) each
        mixed = torch.cat([conv(group) for conv, group in zip(self.conv1d_list, groups, strict=True)], dim=1)
        projected: Tensor = self.projection(mixed.transpose(1, 2))
        return projected


class MixerBlock(nn.Module):
    """A mixer of tokens and an MLP, each on normalised tokens around a skip."""

    def __init__(self, width: int, mixer: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.mixer = mixer
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class CauchyTransformer(nn.Module):
    """Blocks on a class token and patches; the mean of them all is normalised and classified."""

    def __init__(
        self,
        mixer: Callable[[], nn.Module],
        *,
        width: int,
        depth: int,
        num_classes: int,
        in_chans: int,
        img_size: int,
        patch_size: int,
    ) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, width)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + self.patch_embed.num_patches, width))
        self.blocks = nn.Sequential(*(MixerBlock(width, mixer()) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def no_weight_decay(self) -> set[str]:
        return {"cls_token", "pos_embed"}

    def forward(self, x: Tensor) -> Tensor:
        patches: Tensor = self.patch_embed(x)  # (B, N, D)
        tokens = torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], dim=1) + self.pos_embed
        logits: Tensor = self.head(self.norm(self.blocks(tokens).mean(dim=1)))
        return logits


@dataclass(frozen=True)
class Size:
    """`kernels` instead of `heads` make it a CoViT."""

    width: int
    depth: int
    patch_size: int
    heads: int = 0
    kernels: tuple[int, ...] = ()

    def mixer(self) -> nn.Module:
        return TokenConvolutions(self.width, self.kernels) if self.kernels else Attention(self.width, self.heads)

    def __str__(self) -> str:
        mixer = f"kernels {', '.join(map(str, self.kernels))}" if self.kernels else f"heads {self.heads}"
        return f"width {self.width}, depth {self.depth}, {mixer}, patches of {self.patch_size}"


VITS = {
    "t1": Size(128, 4, 16, heads=1),
    "t2": Size(128, 4, 16, heads=4),
    "t3": Size(128, 8, 16, heads=1),
    "t4": Size(128, 8, 16, heads=4),
    "s1": Size(512, 1, 16, heads=1),
    "s2": Size(512, 1, 16, heads=4),
    "s3": Size(512, 4, 16, heads=1),
    "s4": Size(512, 4, 16, heads=4),
    "m1": Size(512, 8, 16, heads=1),
    "m2": Size(512, 8, 16, heads=4),
    "m3": Size(512, 8, 32, heads=4),
    "l": Size(512, 12, 32, heads=8),
}
COVITS = {
    "t1": Size(128, 4, 16, kernels=(3,)),
    "t2": Size(128, 4, 16, kernels=(3, 3, 3, 3)),
    "t3": Size(128, 8, 16, kernels=(3,)),
    "t4": Size(128, 8, 16, kernels=(3, 3, 3, 3)),
    "s1": Size(512, 1, 16, kernels=(3,)),
    "s2": Size(512, 1, 16, kernels=(3, 3, 3, 3)),
    "s3": Size(512, 4, 16, kernels=(3,)),
    "s4": Size(512, 4, 16, kernels=(3, 3, 3, 3)),
    "s5": Size(512, 4, 16, kernels=(7, 7, 7, 7)),
    "m1": Size(512, 8, 16, kernels=(3,)),
    "m2": Size(512, 8, 16, kernels=(1, 3, 5, 7)),
    "m3": Size(512, 8, 16, kernels=(3, 3, 3, 3)),
    "m4": Size(512, 8, 16, kernels=(7, 7, 7, 7)),
    "m5": Size(512, 8, 32, kernels=(3, 3, 3, 3)),
    "l1": Size(512, 12, 32, kernels=(3, 3, 3, 3, 5, 5, 5, 5)),
    "l2": Size(512, 16, 32, kernels=(3, 3, 3, 3, 5, 5, 5, 5)),
}
TINY_VIT = Size(96, 4, 4, heads=4)
TINY_COVIT = Size(96, 4, 4, kernels=(3, 3, 3, 3))


def _register(name: str, size: Size, label: str, native: int = 224) -> None:
    @models.register(name)
    def cauchy(
        *, num_classes: int = 10, in_chans: int = 3, img_size: int = native, patch_size: int = size.patch_size
    ) -> Backbone:
        check_patches(img_size, patch_size)
        network = CauchyTransformer(
            size.mixer,
            width=size.width,
            depth=size.depth,
            num_classes=num_classes,
            in_chans=in_chans,
            img_size=img_size,
            patch_size=patch_size,
        )
        shape = (in_chans, img_size, img_size)
        return Backbone(
            network,
            num_classes,
            shape,
            paper=PAPER,
            attention=None if size.kernels else "tokens",
            renames=RENAMES,
        )

    cauchy.__doc__ = f"{label} of Wang and Ruan: {size}."


for _name, _size in VITS.items():
    _register(f"vit-cauchy/{_name}", _size, f"ViT-{_name.upper()}")
for _name, _size in COVITS.items():
    _register(f"covit/{_name}", _size, f"CoViT-{_name.upper()}")
_register("tiny/vit-cauchy", TINY_VIT, "ViT for 32×32 images as those", native=32)
_register("tiny/covit", TINY_COVIT, "CoViT for 32×32 images as those", native=32)

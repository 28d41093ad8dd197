"""ViT and CoViT of Wang and Ruan 2022: the same network with self-attention, or with convolutions in its place."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from timm.layers import Mlp, PatchEmbed
from torch import Tensor, nn

from bastion.models.classifier import Blocks
from bastion.models.family import Size, family
from bastion.models.stems import check_patches


class Attention(nn.Module):
    """Multi-head self-attention; one projection gives queries and keys interleaved, as in the authors' code."""

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
    """1-D convolutions along the sequence of tokens, with a kernel size for each group of channels."""

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
    """A pre-norm block: attention or convolutions, then an MLP."""

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


def _size(
    label: str, width: int, depth: int, patch_size: int, heads: int = 0, kernels: tuple[int, ...] = (), **defaults: int
) -> Size:
    mixer = f"kernels {', '.join(map(str, kernels))}" if kernels else f"heads {heads}"
    about = f"{label}: width {width}, depth {depth}, {mixer}, patches of {patch_size}."
    return Size(about, width, depth, heads, kernels, patch_size=patch_size, **defaults)


_VITS = {
    "t1": (128, 4, 16, 1),
    "t2": (128, 4, 16, 4),
    "t3": (128, 8, 16, 1),
    "t4": (128, 8, 16, 4),
    "s1": (512, 1, 16, 1),
    "s2": (512, 1, 16, 4),
    "s3": (512, 4, 16, 1),
    "s4": (512, 4, 16, 4),
    "m1": (512, 8, 16, 1),
    "m2": (512, 8, 16, 4),
    "m3": (512, 8, 32, 4),
    "l": (512, 12, 32, 8),
}
_COVITS = {
    "t1": (128, 4, 16, (3,)),
    "t2": (128, 4, 16, (3, 3, 3, 3)),
    "t3": (128, 8, 16, (3,)),
    "t4": (128, 8, 16, (3, 3, 3, 3)),
    "s1": (512, 1, 16, (3,)),
    "s2": (512, 1, 16, (3, 3, 3, 3)),
    "s3": (512, 4, 16, (3,)),
    "s4": (512, 4, 16, (3, 3, 3, 3)),
    "s5": (512, 4, 16, (7, 7, 7, 7)),
    "m1": (512, 8, 16, (3,)),
    "m2": (512, 8, 16, (1, 3, 5, 7)),
    "m3": (512, 8, 16, (3, 3, 3, 3)),
    "m4": (512, 8, 16, (7, 7, 7, 7)),
    "m5": (512, 8, 32, (3, 3, 3, 3)),
    "l1": (512, 12, 32, (3, 3, 3, 3, 5, 5, 5, 5)),
    "l2": (512, 16, 32, (3, 3, 3, 3, 5, 5, 5, 5)),
}
_AS_THOSE = "for 32×32 images as those of Wang and Ruan"


cauchy = partial(
    family,
    paper="Wang and Ruan 2022, Understanding adversarial robustness of vision transformers via Cauchy problem",
    blocks=(Blocks("blocks.*", "tokens", having="mixer.qk"), Blocks("blocks.*")),
    renames=(
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
    ),
)


@cauchy(
    {
        **{f"vit-cauchy/{name}": _size(f"ViT-{name.upper()} of Wang and Ruan", *size) for name, size in _VITS.items()},
        "tiny/vit-cauchy": _size(f"ViT {_AS_THOSE}", 96, 4, 4, heads=4, img_size=32),
    },
    category="Transformer",
)
@cauchy(
    {
        **{
            f"covit/{name}": _size(f"CoViT-{name.upper()} of Wang and Ruan", width, depth, patch, kernels=kernels)
            for name, (width, depth, patch, kernels) in _COVITS.items()
        },
        "tiny/covit": _size(f"CoViT {_AS_THOSE}", 96, 4, 4, kernels=(3, 3, 3, 3), img_size=32),
    },
    category="CNN",
)
class CauchyTransformer(nn.Module):
    """A ViT, or a CoViT if `kernels` are given; the head gets the normalised mean of all tokens."""

    def __init__(
        self,
        width: int,
        depth: int,
        heads: int,
        kernels: tuple[int, ...],
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: int = 224,
        patch_size: int = 16,
    ) -> None:
        check_patches(img_size, patch_size)
        super().__init__()
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, width)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + self.patch_embed.num_patches, width))
        mixers = (TokenConvolutions(width, kernels) if kernels else Attention(width, heads) for _ in range(depth))
        self.blocks = nn.Sequential(*(MixerBlock(width, mixer) for mixer in mixers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def no_weight_decay(self) -> set[str]:
        return {"cls_token", "pos_embed"}

    def forward(self, x: Tensor) -> Tensor:
        patches: Tensor = self.patch_embed(x)  # (B, N, D)
        tokens = torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], dim=1) + self.pos_embed
        logits: Tensor = self.head(self.norm(self.blocks(tokens).mean(dim=1)))
        return logits

"""CeiT (Yuan et al. 2021): a convolutional stem, and a depthwise convolution in every feed-forward layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.layers import Attention, Mlp
from torch import Tensor, nn

from bastion.models.classifier import Blocks
from bastion.models.family import Size, family
from bastion.models.stems import as_image, as_tokens


class ImageToTokens(nn.Module):
    """A stem of stride 4, then a patch embedding of its feature map."""

    def __init__(self, img_size: int, patch_size: int, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        patch = 4 * patch_size
        if patch_size < 1 or img_size % patch:
            raise ValueError(
                f"img_size must be a multiple of 4 · patch_size, as patches are of the stem's map; got {img_size} and "
                f"{patch_size}"
            )
        self.patch_size = (patch, patch)
        self.grid_size = (img_size // patch, img_size // patch)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.stem = nn.Sequential(
            nn.Conv2d(in_chans, 32, 7, 2, padding=4), nn.BatchNorm2d(32), nn.MaxPool2d(3, 2)
        )  # the padding of 4 makes up for the pooling without padding: 32 -> 17 -> 8
        self.proj = nn.Conv2d(32, embed_dim, patch_size, patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return as_tokens(self.proj(self.stem(x)))  # (B, N, d)


class LeFF(nn.Module):
    """Locally enhanced feed-forward: 1×1, depthwise 3×3 and 1×1 convolutions on the grid of patch tokens."""

    def __init__(self, dim: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid
        wide = 4 * dim
        self.layers = nn.Sequential(
            *(nn.Conv2d(dim, wide, 1), nn.BatchNorm2d(wide), nn.GELU()),
            *(nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.GELU()),
            *(nn.Conv2d(wide, dim, 1), nn.BatchNorm2d(dim), nn.GELU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return as_tokens(self.layers(as_image(x, self.grid)))


class CeiTBlock(nn.Module):
    """Attention over all tokens, then LeFF over the patch tokens only."""

    def __init__(self, dim: int, num_heads: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads, qkv_bias=False)
        self.norm2 = nn.LayerNorm(dim)
        self.leff = LeFF(dim, grid)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        patches = x[:, 1:]
        return torch.cat([x[:, :1], patches + self.leff(self.norm2(patches))], dim=1)


class LayerwiseClassAttention(nn.Module):
    """The last block's class token attends to the class tokens of all blocks, (B, L, d) to (B, d)."""

    def __init__(self, dim: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(dim)
        self.q = nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, 2 * dim)

    def forward(self, tokens: Tensor) -> Tensor:
        normed = self.norm1(tokens)
        q, k, v = (
            each.unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # (B, heads, 1 or L, d / heads)
            for each in (self.q(normed[:, -1:]), *self.kv(normed).chunk(2, dim=-1))
        )
        attended = F.scaled_dot_product_attention(q, k, v).flatten(1)  # (B, d), heads in order
        last: Tensor = tokens[:, -1] + self.proj(attended)
        branch: Tensor = self.mlp(self.norm2(last))
        return last + branch


@family(
    {
        "cifar/ceit": Size("CeiT-T for CIFAR-10, 5.6 M parameters: a stem of stride 4, 192 wide, 12 deep.", 192, 12, 3),
        "tiny/ceit": Size(
            "CeiT small enough for two cores, 1.2 M parameters: 64 tokens at 32, 128 wide, 6 deep.",
            *(128, 6, 4),
            patch_size=1,
        ),
    },
    paper="Yuan et al. 2021, Incorporating convolution designs into visual transformers",
    category="hybrid",
    blocks=(Blocks("blocks.*", "tokens"),),
)
class CeiT(nn.Module):
    """`patch_size` is in pixels of the stem's feature map: 4 gives 4 tokens at 32 pixels, 196 at 224.

    `class_attention` adds the paper's attention over the class tokens of all layers; the parameter count that
    Tang et al. give for CIFAR-10 is without it.
    """

    def __init__(
        self,
        embed_dim: int,
        depth: int,
        num_heads: int,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        img_size: int = 32,
        patch_size: int = 4,
        class_attention: bool = False,
    ) -> None:
        super().__init__()
        self.patch_embed = ImageToTokens(img_size, patch_size, in_chans, embed_dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + self.patch_embed.num_patches, embed_dim))
        grid = self.patch_embed.grid_size
        self.blocks = nn.ModuleList(CeiTBlock(embed_dim, num_heads, grid) for _ in range(depth))
        self.class_attention = LayerwiseClassAttention(embed_dim) if class_attention else None
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes)

    def no_weight_decay(self) -> set[str]:
        return {"cls_token", "pos_embed"}

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.patch_embed(x)], dim=1) + self.pos_embed
        classes = []
        for block in self.blocks:
            x = block(x)
            classes.append(x[:, 0])
        last = classes[-1] if self.class_attention is None else self.class_attention(torch.stack(classes, dim=1))
        logits: Tensor = self.head(self.norm(last))
        return logits

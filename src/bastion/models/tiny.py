"""Small sizes of timm's families, for 32×32 images; families implemented here have theirs in their own files."""

from __future__ import annotations

from typing import Any

from bastion.models import models
from bastion.models.classifier import Backbone
from bastion.models.timm import timm_model

_SIZES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tiny/vit": (
        "ViT with a class token for 32×32 images: 64 tokens, 0.5 M parameters.",
        "deit_tiny_patch16_224",
        {"patch_size": 4, "embed_dim": 96, "depth": 4, "num_heads": 4},
    ),
    "tiny/convit": (
        "ConViT for 32×32 images: 64 tokens, 4 blocks that begin as convolutions and one that does not.",
        "convit_tiny",
        {"patch_size": 4, "embed_dim": 24, "depth": 5, "num_heads": 4, "local_up_to_layer": 4},  # 24 per head
    ),
    "tiny/twins": (
        "Twins-SVT for 32×32 images: attention in windows and over the whole map, alternating.",
        "twins_svt_small",
        {
            "patch_size": 2,
            "embed_dims": (32, 64, 96, 128),
            "num_heads": (1, 2, 3, 4),
            "depths": (2, 2, 2, 1),
            "sr_ratios": (4, 2, 1, 1),
            "wss": (4, 4, 4, 2),
        },
    ),
}


def _register(name: str, about: str, large: str, size: dict[str, Any]) -> None:
    @models.register(name)
    def tiny(*, num_classes: int = 10, in_chans: int = 3, img_size: int = 32, drop_path_rate: float = 0.0) -> Backbone:
        options = {**size, "drop_path_rate": drop_path_rate}
        return timm_model(large, num_classes=num_classes, in_chans=in_chans, img_size=img_size, **options)

    tiny.__doc__ = about


for _name, (_about, _large, _size) in _SIZES.items():
    _register(_name, _about, _large, _size)

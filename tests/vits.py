"""Small Vision Transformers whose patches and attention matter."""

from __future__ import annotations

import torch
from torch import nn

from bastion.models import Classifier, checkpoint
from bastion.types import Batch


def small_vit(class_token: bool = True, depth: int = 3, size: int = 16) -> Classifier:
    """In float64, with patches of 4×4 and weights large enough that patches and classes matter."""
    sizes = {"num_classes": 3, "img_size": size, "patch_size": 4, "embed_dim": 16, "depth": depth, "num_heads": 2}
    name = "timm/vit_tiny_patch16_224" if class_token else "vit/micro"
    model = checkpoint.build({"name": name, **sizes}, mean=(0.5,) * 3, std=(0.25,) * 3).eval().double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.5, generator=generator)
    return model


def right_batch(model: nn.Module, n: int = 6, size: int = 16) -> Batch:
    """Random images, under the classes that the model gives them."""
    x = torch.rand(n, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return Batch(torch.arange(n), x, model(x).argmax(1))

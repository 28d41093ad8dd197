"""Linear classifiers of images, which read just what was planted, and can be saved and named."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bastion.models import Backbone, Classifier


def linear(weight: Tensor) -> Classifier:
    """z_k = ⟨w_k, x - 1/2⟩ for weights (K, C, H, W), in float32; an unsaved one has no spec."""
    classes, *shape = weight.shape
    network = nn.Sequential(nn.Flatten(), nn.Linear(weight[0].numel(), classes, bias=False))
    network[1].weight.data = weight.flatten(1).float()
    backbone = Backbone(network, classes, (shape[0], shape[1], shape[2]))
    spec = {"name": "planted", "classes": classes, "shape": shape}
    return Classifier(backbone, (0.5,) * shape[0], (1.0,) * shape[0], spec=spec).eval()


def by_rows(channels: int = 3, size: int = 8) -> Tensor:
    """(size, C, size, size): class k reads row k."""
    return torch.eye(size)[:, None, :, None].expand(size, channels, size, size)


Save = Callable[[str, Tensor], str]  # the fixture `save`

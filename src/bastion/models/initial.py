"""The start that most ViT code gives its layers. timm's own also resets every layer that it does not name."""

from __future__ import annotations

from torch import nn


def truncated(module: nn.Module) -> None:
    """A linear layer or convolution: truncated normal of 0.02, no bias. Others stay as they are."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def truncated_linear(module: nn.Module) -> None:
    """The same of linear layers only."""
    if isinstance(module, nn.Linear):
        truncated(module)

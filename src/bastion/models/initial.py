"""Weight initialisation of most ViT code, as functions for `nn.Module.apply`."""

from __future__ import annotations

from torch import nn


def truncated(module: nn.Module) -> None:
    """Linear layers and convolutions: truncated normal weights of std 0.02, zero biases."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def truncated_linear(module: nn.Module) -> None:
    """The same for linear layers only."""
    if isinstance(module, nn.Linear):
        truncated(module)

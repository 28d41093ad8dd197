"""A network whose attributes its weights and answers do not show."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Shifted(nn.Module):
    """Two of these with equal weights are not equal models."""

    def __init__(self, shift: int = 0, **more: Any) -> None:
        super().__init__()
        self.shift, self.weight = shift, nn.Parameter(torch.ones(1))
        vars(self).update(more)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x.mean(dim=(2, 3))).roll(self.shift, 1)

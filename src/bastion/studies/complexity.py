"""What a model costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from bastion.models.complexity import macs, parameters
from bastion.settings import settings
from bastion.studies import studies
from bastion.types import DataSet, Study


@studies.register("complexity")
@settings
class Complexity(Study):
    """Parameters, and multiply-accumulates of one forward pass on one image of the data."""

    facts: ClassVar[Mapping[str, str]] = {
        "parameters": "how many there are",
        "macs": "multiply-accumulates of a forward pass on one image",
    }

    def __call__(self, model: nn.Module, data: DataSet, part: int, *, seed: int) -> dict[str, Tensor]:
        return {"parameters": torch.tensor(parameters(model)), "macs": torch.tensor(macs(model, data.shape))}

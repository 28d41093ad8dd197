"""The figures of a model by its name: counted without making its weights, and kept for `bastion list models`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bastion.models import complexity, models
from bastion.models.classifier import Classifier

FILE = Path(__file__).parent / "figures.json"


class Figures(NamedTuple):
    parameters: int
    macs: int  # of a forward pass on one image
    shape: tuple[int, int, int]
    blocks: int
    attention: str | None
    paper: str

    def short(self) -> str:
        """In columns."""
        size, maps = f"{self.shape[1]}×{self.shape[2]}", self.attention or "-"
        cost = f"{self.parameters / 1e6:6.1f} M {self.macs / 1e9:5.2f} GMACs"
        return f"{cost} {size:>7} {self.blocks:2} blocks {maps:<8} {self.paper.partition(',')[0]}"


def figures(spec: Mapping[str, Any] | str) -> Figures:
    """Built on torch's meta device, where tensors have a shape and no numbers."""
    with torch.device("meta"):
        backbone = models.build(spec)
        channels = backbone.shape[0]
        model = Classifier(backbone, (0.0,) * channels, (1.0,) * channels)
    return Figures(
        complexity.parameters(model),
        complexity.macs(model),
        backbone.shape,
        len(model.blocks()),
        backbone.attention,
        backbone.paper,
    )


def known() -> dict[str, Figures]:
    """Of the models that come with the package."""
    stored = json.loads(FILE.read_text())
    return {name: Figures(**{**fields, "shape": tuple(fields["shape"])}) for name, fields in stored.items()}

"""Parameters, MACs and blocks of models: counted without allocating weights, and stored for `bastion list models`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bastion.models import complexity, models
from bastion.models.classifier import Classifier
from bastion.models.meta import meta
from bastion.types import Block

FILE = Path(__file__).with_suffix(".json")


class ModelStats(NamedTuple):
    parameters: int
    macs: int  # of a forward pass on one image
    shape: tuple[int, int, int]
    blocks: int
    attending: int  # blocks with self-attention
    attention: str  # what their attention is between; empty if no block has self-attention
    paper: str


def count(spec: Mapping[str, Any] | str) -> ModelStats:
    """Count on torch's meta device, where tensors have shapes but no data."""
    with meta():
        backbone = models.build(spec)
        channels = backbone.shape[0]
        model = Classifier(backbone, (0.0,) * channels, (1.0,) * channels)
    blocks = model.blocks()
    return ModelStats(
        complexity.parameters(model),
        complexity.macs(model),
        backbone.shape,
        len(blocks),
        sum(block.attends for block in blocks),
        attention_between(blocks),
        backbone.paper,
    )


def attention_between(blocks: Iterable[Block]) -> str:
    """What the self-attention of these blocks is between: `tokens`, or `windows, tokens` if they have both."""
    return ", ".join(dict.fromkeys(block.attention for block in blocks if block.attention and block.attends))


def stored() -> dict[str, ModelStats]:
    """The stored counts of all models of the package."""
    rows = json.loads(FILE.read_text())
    return {name: ModelStats(**{**fields, "shape": tuple(fields["shape"])}) for name, fields in rows.items()}

from __future__ import annotations

from pathlib import Path

import pytest
from planted import Save, linear
from torch import Tensor, nn

from bastion.models import Backbone, checkpoint, models


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Save:
    """`save("name", weight)`: the folder of such a classifier."""

    def planted(*, classes: int, shape: list[int]) -> Backbone:
        network = nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes, bias=False))
        return Backbone(network, classes, (shape[0], shape[1], shape[2]))

    monkeypatch.setitem(models._factories, "planted", planted)

    def save(name: str, weight: Tensor) -> str:
        checkpoint.save(linear(weight), tmp_path / name)
        return str(tmp_path / name)

    return save

"""Sizes of a family are registered with their own defaults, from a function or a class."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

from bastion import BastionError
from bastion.models import models
from bastion.models.classifier import Blocks
from bastion.models.family import SMALL, Size, family


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    models.names()
    monkeypatch.setattr(models, "_factories", dict(models._factories))

    @family(
        {
            "toy/large": Size("A toy.", 4),
            "toy/small": Size("A smaller toy.", 2, drop_rate=0.5, **SMALL),
        },
        paper="Nobody 2020",
        blocks=(Blocks("*"),),
    )
    class Toy(nn.Sequential):
        def __init__(
            self,
            depth: int,
            *,
            num_classes: int = 1000,
            in_chans: int = 3,
            img_size: int = 224,
            drop_rate: float = 0.0,
        ) -> None:
            super().__init__(*(nn.Dropout(drop_rate) for _ in range(depth)))


def test_sizes_have_their_architecture_and_their_defaults(registered: None) -> None:
    large, small = models.build("toy/large"), models.build({"name": "toy/small", "in_chans": 1})
    assert (len(large.network), large.num_classes, large.shape) == (4, 1000, (3, 224, 224))
    assert (len(small.network), small.num_classes, small.shape) == (2, 10, (1, 32, 32))
    assert (small.network[0].p, small.paper, small.blocks) == (0.5, "Nobody 2020", (Blocks("*"),))
    assert models.factory("toy/small").__doc__ == "A smaller toy."


def test_options_are_checked_and_the_architecture_is_none(registered: None) -> None:
    options = inspect.signature(models.factory("toy/small")).parameters
    assert list(options) == ["num_classes", "in_chans", "img_size", "drop_rate"]
    with pytest.raises(BastionError, match="model.depth: unknown key"):
        models.build({"name": "toy/small", "depth": 3})
    with pytest.raises(BastionError, match="model.drop_rate: expected a number, got 'much'"):
        models.build({"name": "toy/small", "drop_rate": "much"})

"""Networks without numbers have the shapes of real ones."""

from __future__ import annotations

import pytest
import torch

from bastion.models import models
from bastion.models.meta import meta


@pytest.mark.parametrize("name", ["vit/micro", "resnet/micro", "tiny/swin"])
def test_shapes_are_those_of_a_network_with_numbers(name: str) -> None:
    with meta():
        made = models.build(name).network.state_dict()
    real = models.build(name).network.state_dict()
    assert {key: (each.shape, each.dtype) for key, each in made.items()} == {
        key: (each.shape, each.dtype) for key, each in real.items()
    }
    assert all(each.is_meta for each in made.values())


def test_what_has_numbers_is_filled_as_ever() -> None:
    weight = torch.zeros(3)
    with meta():
        weight.add_(torch.ones(3, device="cpu")).mul_(2)
    assert weight.tolist() == [2.0, 2.0, 2.0]

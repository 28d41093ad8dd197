"""Wide ResNets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bastion import BastionError
from bastion.models import complexity, models
from bastion.models.meta import meta
from bastion.models.wide_resnet import wide_resnet

cifar_wrn = models.factory("cifar/wrn")
cifar_wrn_28_10 = models.factory("cifar/wrn-28-10")
cifar_wrn_34_10 = models.factory("cifar/wrn-34-10")


def test_parameters_are_those_of_the_papers() -> None:
    with meta():
        assert complexity.parameters(cifar_wrn().network) == 55_856_330
        assert complexity.parameters(cifar_wrn_28_10().network) == 36_479_194
        assert complexity.parameters(cifar_wrn_34_10().network) == 46_160_474


def test_convolutions_start_as_kaiming_says_and_biases_at_zero() -> None:
    network = wide_resnet(10, 8, True)
    convs = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    assert len(convs) == 1 + 2 * 3 + 3
    assert all(conv.bias is not None and not conv.bias.any() for conv in convs)
    last = network.stages[2][0].conv2.weight
    assert last.std().item() == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.01)


def test_dropout_is_between_the_convolutions_and_can_be_set() -> None:
    network = wide_resnet(10, 1, drop_rate=0.5)
    seen: list[float] = []
    for stage in network.stages:
        stage[0].conv2.register_forward_pre_hook(lambda _, inputs: seen.append((inputs[0] == 0).double().mean().item()))
    x = torch.randn(4, 3, 16, 16)
    network.train()(x)
    network.eval()(x)
    train, evaluation = seen[:3], seen[3:]
    assert min(train) > 0.7 and max(evaluation) < 0.7  # half of them are zero by ReLU
    with pytest.raises(BastionError, match="dropout probability"):
        models.build({"name": "cifar/wrn", "drop_rate": 1.5})

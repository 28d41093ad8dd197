"""Pre-activation ResNets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from bastion.models import complexity, models
from bastion.models.meta import meta
from bastion.models.preact import PreActBlock, PreActBottleneck, PreActResNet

cifar_preact_resnet = models.factory("cifar/preact-resnet")
cifar_preact_resnet18 = models.factory("cifar/preact-resnet18")


def test_parameters_are_those_of_the_papers() -> None:
    with meta():
        assert complexity.parameters(cifar_preact_resnet().network) == 23_509_066
        assert complexity.parameters(cifar_preact_resnet18().network) == 11_171_146


def test_a_block_is_its_formula() -> None:
    block, x = PreActBlock(4, 6, 2).eval(), torch.randn(2, 4, 8, 8)
    active = F.relu(block.norm1(x))
    branch = F.conv2d(active, block.conv1.weight, stride=2, padding=1)
    branch = F.conv2d(F.relu(block.norm2(branch)), block.conv2.weight, padding=1)
    assert block.skip is not None
    assert torch.equal(block(x), branch + F.conv2d(active, block.skip.weight, stride=2))


def test_a_bottleneck_of_the_same_shape_adds_to_its_input() -> None:
    block, x = PreActBottleneck(16, 4, 1).eval(), torch.randn(2, 16, 5, 5)
    nn.init.zeros_(block.conv3.weight)
    assert torch.equal(block(x), x)
    assert PreActBottleneck(16, 8, 2)(x).shape == (2, 32, 3, 3)


def test_without_the_last_norm_the_head_sees_the_mean_of_the_last_block() -> None:
    network = PreActResNet((4, 8), (1, 2), 3, 3, final_norm=False).eval()
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(network(x), network.head(network.stages(network.stem(x)).mean((2, 3))))
    assert network.stages(network.stem(x)).min() < 0  # no activation either


def test_every_activation_is_a_module() -> None:
    network = models.build({"name": "resnet/micro", "act_layer": "silu"}).network
    assert sum(isinstance(module, nn.SiLU) for module in network.modules()) == 2 * 6 + 1
    assert not any(isinstance(module, nn.ReLU) for module in network.modules())


def test_resnet_micro_keeps_the_names_that_its_checkpoints_have() -> None:
    names = {name for name, _ in models.build("resnet/micro").network.named_parameters()}
    assert len(names) == 1 + 6 * 6 + 2 + 4
    assert {"stem.weight", "stages.1.0.norm1.weight", "stages.1.0.conv2.weight", "stages.1.0.skip.weight"} <= names
    assert {"norm.weight", "norm.bias", "head.weight", "head.bias"} <= names

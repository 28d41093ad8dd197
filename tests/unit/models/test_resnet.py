"""ResNets and ResNeXt with a stem for small images."""

from __future__ import annotations

import torch

from bastion.models import complexity, models
from bastion.models.classifier import Classifier
from bastion.models.meta import meta

cifar_resnet = models.factory("cifar/resnet")
cifar_resnet18 = models.factory("cifar/resnet18")
cifar_resnext = models.factory("cifar/resnext")


def test_parameters_are_those_of_the_papers() -> None:
    with meta():
        assert complexity.parameters(cifar_resnet().network) == 23_520_842
        assert complexity.parameters(cifar_resnet18().network) == 11_173_962
        assert complexity.parameters(cifar_resnext().network) == 9_128_778


def test_the_first_stage_has_the_size_of_the_image() -> None:
    with meta():
        for make, blocks in ((cifar_resnet, 16), (cifar_resnet18, 8), (cifar_resnext, 9)):
            model = Classifier(make(img_size=224), (0.5,) * 3, (0.5,) * 3).eval()
            with model.tap("blocks") as taps:
                assert model(torch.empty(1, 3, 224, 224)).shape == (1, 10)
            maps = list(taps.blocks.values())
            assert len(maps) == blocks
            assert maps[0].shape[-1] == 224
            assert maps[-1].shape[-1] == 224 // (4 if make is cifar_resnext else 8)


def test_a_resnext_convolves_in_two_groups_of_64_and_a_stem_of_single_pixels() -> None:
    with meta():
        network = cifar_resnext().network
    assert network.conv1.weight.shape == (64, 3, 1, 1)
    for stage, width in ((network.layer1, 128), (network.layer2, 256), (network.layer3, 512)):
        assert all(block.conv2.weight.shape == (width, width // 2, 3, 3) for block in stage)
        assert all(block.conv3.out_channels == 2 * width for block in stage)

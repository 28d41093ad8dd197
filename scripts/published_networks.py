"""Networks that others trained and published; each function takes the folder with their files.

Pixels in [0, 1] go in. `ResNet-2b` normalises them by the values that VNN-COMP gives.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bastion.models import Backbone, Classifier


def _weights(path: Path) -> dict[str, Tensor]:
    content = torch.load(path, weights_only=True, map_location="cpu")
    state: dict[str, Tensor] = content.get("state_dict", content)
    return state


def fgsm_trained(folder: Path) -> nn.Module:
    """For MNIST; Wong et al. 2020, Fast is better than free."""
    network = nn.Sequential(
        *(nn.Conv2d(1, 16, 4, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 4, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(1568, 100), nn.ReLU(), nn.Linear(100, 10)),
    )
    network.load_state_dict(_weights(folder / "mnist_fgsm.pth"))
    return network.eval()


class LeNet(nn.Module):
    """For MNIST; of advertorch's examples."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.linear1, self.linear2 = nn.Linear(3136, 200), nn.Linear(200, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv1(x).relu(), 2)
        x = F.max_pool2d(self.conv2(x).relu(), 2)
        logits: Tensor = self.linear2(self.linear1(x.flatten(1)).relu())
        return logits


def lenet(folder: Path, kind: str) -> nn.Module:
    """`clntrained`: in the standard way; `advtrained`: with PGD at linf 0.3."""
    network = LeNet()
    network.load_state_dict(_weights(folder / f"mnist_lenet5_{kind}.pt"))
    return network.eval()


class Block(nn.Module):
    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, stride=stride, padding=1)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1)
        self.shortcut = nn.Sequential(nn.Conv2d(channels, 16, 1, stride=stride)) if stride > 1 else nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.conv2(self.conv1(x).relu()) + self.shortcut(x)
        return made.relu()


def resnet_2b(folder: Path) -> nn.Module:
    """For CIFAR-10; of VNN-COMP 2021."""
    network = nn.Sequential()
    network.conv1, network.relu1 = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU()
    network.layer1 = nn.Sequential(Block(8, 2), Block(16, 1))
    network.flatten = nn.Flatten()
    network.linear1, network.relu2, network.linear2 = nn.Linear(1024, 100), nn.ReLU(), nn.Linear(100, 10)
    network.load_state_dict(_weights(folder / "cifar10_resnet2b.pth"))
    backbone = Backbone(network, 10, (3, 32, 32))
    return Classifier(backbone, (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)).eval()


def resnet18(_: Path) -> nn.Module:
    """For CIFAR-10, trained in the standard way; inside the package of AutoAttack's official code."""
    import pyautoattack
    from pyautoattack.examples.resnet import ResNet18

    network: nn.Module = ResNet18()
    network.load_state_dict(_weights(Path(pyautoattack.__file__).parent / "examples" / "model_test.pt"))
    return network.eval()

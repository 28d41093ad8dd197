"""Things that many tests use: small data, small models, linear classifiers with known answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bastion.acceleration import Accelerated
from bastion.data.arrays import ArraySplit
from bastion.models import Backbone, Classifier
from bastion.threat import Threat
from bastion.types import Attack, Batch, DataSet


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Small tensors are faster on one thread, and results do not depend on the machine's cores."""
    torch.set_num_threads(1)


class Linear(nn.Module):
    """z = W·x + b on flattened pixels: the classifier whose adversarial examples are known in closed form."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.flatten(1), self.weight, self.bias)


def unaccelerated(model: nn.Module, batch_size: int) -> Accelerated:
    """The model itself, run on so many images at once by attacks that share batches."""
    return Accelerated(model.eval(), enabled=False, batch_size=batch_size)


MakeLinear = Callable[..., tuple[Linear, Batch]]


class AttackBy(Attack):
    """A function as an attack."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Any:
        return self.function(model, batch, threat, seed=seed)


@pytest.fixture
def make_linear() -> MakeLinear:
    """`make_linear(classes=2, n=16)`: a linear model in float64 and images that it classifies right."""

    def make(
        classes: int = 2, n: int = 16, shape: tuple[int, int, int] = (3, 6, 5), interior: bool = False
    ) -> tuple[Linear, Batch]:
        generator = torch.Generator().manual_seed(7)
        size = int(np.prod(shape))
        weight = torch.randn(classes, size, generator=generator, dtype=torch.float64)
        x = torch.rand(n, *shape, generator=generator, dtype=torch.float64)
        x = 0.45 + 0.1 * x if interior else x
        model = Linear(weight, -weight @ torch.full((size,), 0.5, dtype=torch.float64))
        return model, Batch(torch.arange(n), x, model(x).argmax(1))

    return make


@pytest.fixture
def tiny_data() -> DataSet:
    """48 training, 16 validation and 40 test images of 8×8 in three classes that a small model can tell apart."""
    noise = np.random.default_rng(0)

    def images(n: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(n, dtype=np.uint8) % 3
        pictures = noise.integers(0, 120, (n, 8, 8, 3), dtype=np.uint8)
        for row, label in enumerate(labels):
            pictures[row, :, :, label] += 80
        return pictures, labels

    train, test = ArraySplit(*images(64)), ArraySplit(*images(40))
    return DataSet(
        name="tiny",
        classes=("red", "green", "blue"),
        shape=(3, 8, 8),
        mean=(0.4, 0.4, 0.4),
        std=(0.2, 0.2, 0.2),
        train=train.subset(range(48)),
        val=train.subset(range(48, 64)),
        test=test,
        fingerprint="tiny-1",
    )


@pytest.fixture
def tiny_model() -> Classifier:
    """A convolutional classifier for `tiny_data`, with BatchNorm so that train and eval mode differ."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    return Classifier(Backbone(network, 3, (3, 8, 8)), (0.4, 0.4, 0.4), (0.2, 0.2, 0.2))


# A recipe that trains in a second: changes on top of base/micro.
QUICK = (
    "model={name: vit/micro, stem: [8, 16], embed_dim: 16, depth: 1, num_heads: 2}",
    "train_limit=96",
    "batch=32",
    "schedule.epochs=2",
    "validate.limit=40",
    "log_every=1",
)
ADVERSARIAL = (
    "objective={name: adversarial, threat: {norm: linf, eps: 8/255}, attack: {name: fgsm-rs, keep: last}}",
    "validate.attack={name: fgsm}",
)

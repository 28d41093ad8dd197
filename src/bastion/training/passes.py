"""How often a run sends an image through its model: counted on a small stand-in, so that any plug-in is right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bastion import rng
from bastion.acceleration import for_training
from bastion.attacks import attacks
from bastion.attacks.judge import judge
from bastion.forward import predict
from bastion.models import Classifier, checkpoint
from bastion.recipe import Recipe
from bastion.training.validation import validation_threat
from bastion.types import Batch, Objective

IMAGES = 4
SURE = 20.0  # the lead of the stand-in's right logit: no attack takes it, so all of them spend their whole budget


@dataclass
class Passes:
    """What one image takes."""

    forward: float = 0.0
    backward: float = 0.0  # through the activations, whatever the gradient is for
    weights: float = 0.0  # those of them that make the gradients of the weights too

    @property
    def units(self) -> float:
        """In forward passes: the gradient of the activations costs as much as one, and so does that of the weights."""
        return self.forward + self.backward + self.weights

    def times(self, factor: float) -> Passes:
        return Passes(self.forward * factor, self.backward * factor, self.weights * factor)

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.backward + other.backward, self.weights + other.weights)

    def __str__(self) -> str:
        ways = {
            "forward": self.forward,
            "backward to the input": self.backward - self.weights,
            "backward to the weights": self.weights,
        }
        return ", ".join(f"{count:.4g} {way}" for way, count in ways.items() if count)


def step_passes(
    objective: Objective, shape: tuple[int, int, int], classes: int, *, progress: float
) -> tuple[Passes, Passes]:
    """To find the example, and to learn from it once. What only the log needs is left out."""
    model, batch = stand_in(shape, classes)
    model.train()
    with counted(model) as finding:
        example = objective.prepare(model, batch, progress=progress, seed=0)
    with counted(model) as learning:
        objective.loss(model, example).total.backward()  # type: ignore[no-untyped-call]
    return finding, learning


def learning_twice(recipe: Recipe) -> float:
    """The share of steps that go on to learn at worse weights, as SAM and AWP do."""
    worse = recipe.optimizer.perturb
    return max(0.0, 1 - worse.after / recipe.schedule.epochs) if worse else 0.0


def validation_passes(recipe: Recipe, objective: Objective, shape: tuple[int, int, int], classes: int) -> Passes:
    """Of a held-out image, once, if the attack does not fool the model on it."""
    model, batch = stand_in(shape, classes)
    spec = recipe.validate_.attack
    with counted(model.eval()) as passes, for_training(model) as attacked:
        if spec is None:
            predict(model, batch)
        else:
            threat = validation_threat(recipe, objective)
            judge(attacked, batch, attacks.build(spec.plain(), "validate.attack"), threat, seed=0)
    return passes


def stand_in(shape: tuple[int, int, int], classes: int) -> tuple[Classifier, Batch]:
    """A tiny ViT for images of this shape, and images that it gets right by a wide margin."""
    channels = shape[0]
    spec = {"name": "vit/micro", "num_classes": classes, "in_chans": channels, "patch_size": 8}
    small = {"embed_dim": 16, "depth": 2, "num_heads": 2}
    model = checkpoint.build(
        spec | small, mean=(0.5,) * channels, std=(0.25,) * channels, shape=shape, resize="bilinear"
    )
    network: Any = model.network
    network.mark = nn.Parameter(torch.zeros(()))  # what `counted` sees the gradients of the weights by
    with torch.no_grad():
        network.head.bias[0] = SURE
    index = torch.arange(IMAGES)
    return model, Batch(index, rng.uniform(0, index, "stand-in", shape), torch.zeros_like(index))


@contextmanager
def counted(model: Classifier) -> Iterator[Passes]:
    """The passes that are made inside, per image of the stand-in's batch."""
    passes = Passes()

    def watch(network: Any, inputs: tuple[Tensor]) -> Tensor:
        share = len(inputs[0]) / IMAGES
        weights: Tensor = network.mark * 1  # this pass's own; the gradient of `mark` itself is a sum over passes
        x = inputs[0] + weights

        def went_back(_: Tensor) -> None:
            passes.backward += share

        def reached_weights(_: Tensor) -> None:
            passes.weights += share

        passes.forward += share
        for tensor, happened in ((x, went_back), (weights, reached_weights)):
            if tensor.requires_grad:
                tensor.register_hook(happened)  # type: ignore[no-untyped-call]  # if its gradient is asked for
        return x

    handle = model.network.register_forward_pre_hook(watch)
    try:
        yield passes
    finally:
        handle.remove()

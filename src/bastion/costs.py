"""Cost of a run, computed from its recipe: images, passes per image through the model, FLOP.

A multiply-accumulate is 2 FLOP. A forward pass on an image is one unit of 2·MACs; so is the gradient of its
activations, and so is the gradient of the weights. A pass for the input's gradient thus costs 2, a training pass 3.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from bastion import rng
from bastion.acceleration import for_training
from bastion.attacks import attacks
from bastion.attacks.judge import judge
from bastion.data import datasets
from bastion.data.known import SIZES, outline
from bastion.data.loader import batch_layout
from bastion.data.pool import Pool
from bastion.data.split import limited
from bastion.errors import BastionError
from bastion.forward import predict
from bastion.models import Classifier, checkpoint, complexity, models
from bastion.models.load import best_device
from bastion.progress import bar
from bastion.recipe import Recipe, Spec
from bastion.run import Run
from bastion.training.build import build_model, build_objective, set_up_objective, validation_threat
from bastion.training.distributed import Processes
from bastion.training.objectives import objectives
from bastion.training.trainer import Trainer
from bastion.types import Batch, DataSet, TrainingContext

IMAGES = 4  # in the batch of the dummy model
CERTAIN = 20.0  # margin of the dummy model: no attack succeeds, so all of them spend their whole budget


@dataclass
class Passes:
    """Passes per image."""

    forward: float = 0.0
    backward: float = 0.0  # all backward passes
    weights: float = 0.0  # those that also compute gradients of the weights

    @property
    def units(self) -> float:
        """Cost in forward passes: the gradients of the activations and of the weights cost as much as one each."""
        return self.forward + self.backward + self.weights

    def plus(self, other: Passes, times: float = 1.0) -> Passes:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Passes(*(own + times * more for own, more in pairs))

    def __str__(self) -> str:
        ways = {
            "forward": self.forward,
            "backward to the input": self.backward - self.weights,
            "backward to the weights": self.weights,
        }
        return ", ".join(f"{count:.4g} {way}" for way, count in ways.items() if count)


@dataclass(frozen=True)
class RunPlan:
    """Cost of a run. None and 0 mean not known, because something is missing; `notes` say what."""

    data: DataSet | None
    outlined: bool  # the data set is known, but its files are missing
    model: Classifier | None
    macs: int
    training: Passes  # per image and epoch
    validation: Passes
    images: int  # trained on, over all epochs
    validated: int
    notes: list[str]

    @property
    def flops(self) -> float:
        return 2.0 * self.macs * (self.training.units * self.images + self.validation.units * self.validated)

    def hours(self, images_per_second: float) -> float:
        """Return the hours at this speed of training; validation runs at the same FLOP per second."""
        validated = self.validated * self.validation.units / self.training.units
        return (self.images + validated) / images_per_second / 3600


def plan_run(recipe: Recipe) -> RunPlan:
    """Compute the cost of a recipe's run. The data set may be missing."""
    _check(recipe)
    data, lacking = _data(recipe.data, "data")
    notes = {"data": lacking} if lacking else {}
    extra = []
    for number, each in enumerate(recipe.extra):
        found, why = _data(each.data, f"extra.{number}.data")
        extra += [(found.train, each.share)] if found else []
        if why:
            notes[f"extra.{number}"] = why if found else f"{why}; without these extra images"
    model = build_model(recipe, data) if data else None
    images = validated = 0
    if data:
        epochs, settings = recipe.schedule.epochs, recipe.validate_
        pool = Pool(limited(data.train, recipe.train_limit), extra)
        images = batch_layout(pool, recipe.batch, recipe.augment.repeats).steps * recipe.batch * epochs
        seen = len(limited(data.val, settings.limit)) + len(limited(data.train, settings.train))
        validated = seen * -(-epochs // settings.every)  # the last epoch always counts
    return RunPlan(
        data=data,
        outlined=bool(lacking),
        model=model,
        macs=complexity.macs(model) if model else 0,
        training=training_passes(recipe, data),
        validation=validation_passes(recipe, data),
        images=images,
        validated=validated,
        notes=list(notes.values()),
    )


def _check(recipe: Recipe) -> None:
    datasets.check(recipe.data.plain(), "data")
    models.check(recipe.model.plain(), "model")
    build_objective(recipe)


def _data(spec: Spec, path: str) -> tuple[DataSet | None, str]:
    """Return the data set, or its outline if that is known; and the error if it is missing."""
    try:
        return datasets.build(spec.plain(), path), ""
    except BastionError as error:
        return (outline(spec.plain()) if spec.name in SIZES else None), str(error)


def training_passes(recipe: Recipe, data: DataSet | None = None) -> Passes:
    """Return the passes per image and epoch, averaged over the run, counted on a dummy model, so for any plug-in.

    Passes that only the log needs are left out.
    """
    prepare, loss = step_passes(recipe, data)
    perturb = recipe.optimizer.perturb  # SAM and AWP take the loss a second time, from some epoch on
    twice = max(0.0, 1 - perturb.after / recipe.schedule.epochs) if perturb else 0.0
    return prepare.plus(loss, times=1 + twice)


def step_passes(recipe: Recipe, data: DataSet | None = None) -> tuple[Passes, Passes]:
    """Return the passes to prepare an image, and those for its loss and backward pass."""
    data = data or outline({"name": "cifar10"})
    model, batch = dummy_model(data)
    objective = objectives.build(recipe.objective.plain(), "objective")
    set_up_objective(objective, TrainingContext(model, data, recipe))
    model.train()
    with counted(model) as prepare:
        prepared = objective.prepare(model, batch, progress=recipe.schedule.epochs / 2, seed=0)
    with counted(model) as loss:
        objective.loss(model, prepared).total.backward()  # type: ignore[no-untyped-call]
    return prepare, loss


def validation_passes(recipe: Recipe, data: DataSet | None = None) -> Passes:
    """Return the passes per held-out image, if the attack does not succeed."""
    model, batch = dummy_model(data or outline({"name": "cifar10"}))
    spec = recipe.validate_.attack
    with counted(model.eval()) as passes, for_training(model) as attacked:
        if spec is None:
            predict(model, batch)
        else:
            threat = validation_threat(recipe, objectives.build(recipe.objective.plain(), "objective"))
            judge(attacked, batch, attacks.build(spec.plain(), "validate.attack"), threat, seed=0)
    return passes


def dummy_model(data: DataSet) -> tuple[Classifier, Batch]:
    """Return a tiny ViT for this data set's images, and a batch that it classifies with a large margin."""
    channels, classes = data.shape[0], len(data.classes)
    spec = {"name": "vit/micro", "num_classes": classes, "in_chans": channels, "patch_size": 8}
    small = {"embed_dim": 16, "depth": 2, "num_heads": 2}
    model = checkpoint.build(
        spec | small, mean=(0.5,) * channels, std=(0.25,) * channels, shape=data.shape, resize="bilinear"
    )
    network: Any = model.network
    network.mark = nn.Parameter(torch.zeros(()))  # tells `counted` of gradients of the weights
    with torch.no_grad():
        network.head.bias[0] = CERTAIN
    index = torch.arange(IMAGES)
    return model, Batch(index, rng.uniform(0, index, "stand-in", data.shape), torch.zeros_like(index))


@contextmanager
def counted(model: Classifier) -> Iterator[Passes]:
    """Count the passes inside, per image of the dummy model's batch."""
    passes = Passes()

    def add(way: str, share: float) -> None:
        setattr(passes, way, getattr(passes, way) + share)

    def count(network: Any, inputs: tuple[Tensor]) -> Tensor:
        share = len(inputs[0]) / IMAGES
        weights: Tensor = network.mark * 1  # one per pass, as the gradient of `mark` itself is a sum over passes
        x = inputs[0] + weights
        add("forward", share)
        for tensor, way in ((x, "backward"), (weights, "weights")):
            if tensor.requires_grad:  # called if its gradient is computed
                tensor.register_hook(lambda _, way=way: add(way, share))  # type: ignore[no-untyped-call]
        return x

    handle = model.network.register_forward_pre_hook(count)
    try:
        yield passes
    finally:
        handle.remove()


def images_per_second(recipe: Recipe, seconds: float = 10.0) -> float:
    """Time the training loop on this machine, with loading and augmentation. Nothing is written."""
    with tempfile.TemporaryDirectory() as folder, bar("timing training steps", None):
        trainer = Trainer(recipe, Run(Path(folder)), Processes(device=best_device()))
        marks = [time.monotonic()]
        for batch in trainer.batches():
            trainer.train_step(batch)
            trainer.step += 1
            marks.append(time.monotonic())
            if len(marks) > 2 and marks[-1] - marks[0] > seconds:
                break
    times = [after - before for before, after in pairwise(marks)]
    return recipe.batch / median(times[1:] or times)  # the first step warms up

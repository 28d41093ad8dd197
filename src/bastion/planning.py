"""What a recipe's run will take, as far as that can be told before it starts: data and model need not be here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bastion.costs import flops
from bastion.data import datasets
from bastion.data.known import FACTS, outline
from bastion.data.loader import plan
from bastion.data.pool import Pool
from bastion.errors import BastionError
from bastion.models import Classifier, complexity, models
from bastion.recipe import Recipe, Spec
from bastion.registry import Registry
from bastion.training.build import build_model, build_objective
from bastion.training.objectives import objectives
from bastion.training.passes import Passes, learning_twice, step_passes, validation_passes
from bastion.types import DataSet, Objective

UNKNOWN = ((3, 32, 32), 10)  # shape and classes of images of which nothing is known


@dataclass(frozen=True)
class Prospect:
    """What there is of a run. None: not there, and `notes` say why."""

    recipe: Recipe
    objective: Objective | None
    data: DataSet | None
    model: Classifier | None
    extra: list[tuple[DataSet, float | None]]
    outlined: bool  # the data set is known, but its files are not here
    notes: list[str]


@dataclass(frozen=True)
class Load:
    """What the images of a run take."""

    finding: Passes  # the example to learn from
    learning: Passes  # from it, once
    twice: float  # the share of steps that learn a second time
    looking: Passes  # at an image that is validated with
    images: int  # that are learnt from, in all epochs
    looked: int  # that are validated with

    @property
    def training(self) -> Passes:
        return self.finding + self.learning.times(1 + self.twice)

    def flops(self, macs: int) -> float:
        return flops(macs, self.training.units, self.images) + flops(macs, self.looking.units, self.looked)


def look_ahead(recipe: Recipe) -> Prospect:
    objective, waiting = _checked(recipe)
    data, lacking = _data(recipe.data, "data")
    notes = [*waiting.values(), *([lacking] if lacking and "data" not in waiting else [])]
    extra = []
    for number, each in enumerate(recipe.extra):
        found, why = _data(each.data, f"extra.{number}.data")
        extra += [(found, each.share)] if found else []
        notes += [f"{why}; without these extra images" if found is None else why] if why else []
    model = build_model(recipe, data) if data and "model" not in waiting else None
    return Prospect(recipe, objective, data, model, extra, bool(lacking), notes)


def load_of(prospect: Prospect) -> Load | None:
    """None without an objective; without data the numbers of images are 0."""
    recipe, objective, data = prospect.recipe, prospect.objective, prospect.data
    if objective is None:
        return None
    shape, classes = (data.shape, len(data.classes)) if data else UNKNOWN
    finding, learning = step_passes(objective, shape, classes, progress=recipe.schedule.epochs / 2)
    looking = validation_passes(recipe, objective, shape, classes)
    images, looked = (_images(prospect, data), _looked(recipe, data)) if data else (0, 0)
    return Load(finding, learning, learning_twice(recipe), looking, images, looked)


def macs_of(prospect: Prospect) -> int:
    return complexity.macs(prospect.model) if prospect.model else 0


def _checked(recipe: Recipe) -> tuple[Objective | None, dict[str, str]]:
    """The objective; and what is announced but not there, by its place in the recipe. All else is checked."""
    named: dict[str, tuple[Registry[Any], Spec]] = {
        "data": (datasets, recipe.data),
        "model": (models, recipe.model),
        "objective": (objectives, recipe.objective),
    }
    waiting = {
        path: f"{path}: the {registry.kind} '{spec.name}' is not available yet"
        for path, (registry, spec) in named.items()
        if registry.awaits(spec.name)
    }
    if not waiting:
        return build_objective(recipe), {}
    for path, (registry, spec) in named.items():
        if path not in waiting:
            registry.check(spec.plain(), path)
    ready = "objective" not in waiting
    return (objectives.build(recipe.objective.plain(), "objective") if ready else None), waiting


def _data(spec: Spec, path: str) -> tuple[DataSet | None, str]:
    """The data set, or its outline if that is known; and why it is not here, if it is not."""
    try:
        return datasets.build(spec.plain(), path), ""
    except BastionError as error:
        return (outline(spec.plain()) if spec.name in FACTS else None), str(error)


def _images(prospect: Prospect, data: DataSet) -> int:
    """As the training loop draws them: whole batches, extra images and copies counted."""
    recipe, own = prospect.recipe, data.train
    if recipe.train_limit is not None and recipe.train_limit < len(own):
        own = own.subset(range(recipe.train_limit))
    pool = Pool(own, [(extra.train, share) for extra, share in prospect.extra])
    return plan(pool, recipe.batch, recipe.augment.repeats).steps * recipe.batch * recipe.schedule.epochs


def _looked(recipe: Recipe, data: DataSet) -> int:
    settings, epochs = recipe.validate_, recipe.schedule.epochs
    seen = min(settings.limit or len(data.val), len(data.val)) + min(settings.train, len(data.train))
    return seen * -(-epochs // settings.every)  # the last epoch always counts

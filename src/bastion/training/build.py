"""What a recipe names, built: objective and model."""

from __future__ import annotations

from bastion.attacks import attacks
from bastion.data import datasets
from bastion.errors import BastionError
from bastion.models import Classifier, checkpoint
from bastion.models import models as model_families
from bastion.recipe import Recipe, Stats
from bastion.training.objectives import objectives
from bastion.training.validation import validation_threat
from bastion.types import DataSet, Objective


def build_objective(recipe: Recipe) -> Objective:
    """The objective. All else that the recipe names is checked too, before anything is loaded or written."""
    datasets.check(recipe.data.plain(), "data")
    for number, extra in enumerate(recipe.extra):
        datasets.check(extra.data.plain(), f"extra.{number}.data")
    model_families.check(recipe.model.plain(), "model")
    objective = objectives.build(recipe.objective.plain(), "objective")
    if recipe.validate_.attack is not None:
        attacks.build(recipe.validate_.attack.plain(), "validate.attack")
        validation_threat(recipe, objective)
    return objective


def build_model(recipe: Recipe, data: DataSet) -> Classifier:
    """The recipe's model for this data set, with the weights that its seed gives."""
    if isinstance(recipe.normalize, Stats):
        mean, std = recipe.normalize.mean, recipe.normalize.std
    elif recipe.normalize == "data":
        mean, std = data.mean, data.std
    else:
        mean, std = (0.0,) * data.shape[0], (1.0,) * data.shape[0]
    given = {"num_classes": len(data.classes), "in_chans": data.shape[0]}
    spec = {**given, **recipe.model.plain()}
    for key, value in given.items():
        if spec[key] != value:
            raise BastionError(f"model.{key}: {data.name} has {value}, the recipe says {spec[key]}; leave it out")
    model = checkpoint.build(spec, mean=mean, std=std, shape=data.shape, resize=recipe.resize, seed=recipe.seed)
    model.check_input(data.shape, f"model on {data.name}")
    return model

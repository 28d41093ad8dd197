"""Builds the objective and the model that a recipe names."""

from __future__ import annotations

from bastion import rng
from bastion.attacks import Threat, attacks
from bastion.data import datasets
from bastion.errors import BastionError
from bastion.models import Classifier, checkpoint
from bastion.models import models as model_families
from bastion.recipe import Normalisation, Recipe
from bastion.settings import check_arguments
from bastion.training.objectives import objectives
from bastion.training.user_objects import UserObjects
from bastion.types import DataSet, Objective, TrainingContext

NOTHING = UserObjects()


def build_objective(recipe: Recipe, objects: UserObjects = NOTHING) -> Objective:
    """The objective of a recipe; all else that the recipe names is checked too, before anything is loaded."""
    if objects.data is None:
        datasets.check(recipe.data.plain(), "data")
    for number, extra in enumerate(recipe.extra):
        datasets.check(extra.data.plain(), f"extra.{number}.data")
    if objects.model is None:
        model_families.check(recipe.model.plain(), "model")
    objective = objectives.build(recipe.objective.plain(), "objective")
    if recipe.validate_.attack is not None:
        attacks.build(recipe.validate_.attack.plain(), "validate.attack")
        validation_threat(recipe, objective)
    return objective


def set_up_objective(objective: Objective, context: TrainingContext) -> None:
    """Call the objective's `setup`, with torch seeded by the recipe, and check the networks that it creates."""
    with rng.preserved():
        rng.reseed("objective", context.recipe.seed)
        try:
            objective.setup(context)
        except (BastionError, ValueError) as error:
            raise BastionError(f"objective: {error}") from error
    networks, optimizer = objective.networks, objective.optimizer
    own = {each for each in networks.parameters() if each.requires_grad} if networks is not None else set()
    if own != {each for group in (optimizer.param_groups if optimizer else ()) for each in group["params"]}:
        raise BastionError(
            f"objective: the optimizer of '{context.recipe.objective.name}' must train its own networks, all of them "
            "and nothing else; give what is not to be trained requires_grad=False"
        )
    if networks is not None:
        networks.to(next(context.model.parameters()).device)


def build_model(recipe: Recipe, data: DataSet) -> Classifier:
    """The recipe's model for this data set, with random weights from the recipe's seed."""
    if isinstance(recipe.normalize, Normalisation):
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


def validation_threat(recipe: Recipe, objective: Objective) -> Threat:
    """`validate.threat` of the recipe, or the threat of the objective."""
    if recipe.validate_.threat is not None:
        return Threat(**check_arguments(Threat, recipe.validate_.threat, "validate.threat"))
    threat = getattr(objective, "threat", None)
    if not isinstance(threat, Threat):
        raise BastionError("validate.threat: missing; the objective has none of its own, so the attack needs one here")
    return threat

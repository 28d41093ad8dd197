"""Accuracy on held-out images, shared out to all processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bastion.attacks import Attack, Threat, attacks
from bastion.attacks.judge import judge, standing
from bastion.errors import BastionError
from bastion.models import Classifier
from bastion.models.classifier import in_mode
from bastion.recipe import Recipe
from bastion.settings import check_arguments
from bastion.training.world import World
from bastion.types import Objective, Split

BATCH = 256


def accuracies(
    model: Classifier, split: Split, attack: Attack | None, threat: Threat | None, seed: int, world: World
) -> dict[str, float]:
    """`clean` and, if there is an attack, `robust`."""
    counts = [0, 0]
    with in_mode(model, training=False):
        for start in range(BATCH * world.rank, len(split), BATCH * world.size):
            batch = split.batch(range(start, min(start + BATCH, len(split)))).to(world.device)
            if attack and threat:
                verdict = judge(model, batch, attack, threat, seed=seed)
                counts[0] += int(verdict.clean.sum())
                counts[1] += int((verdict.clean & ~verdict.fooled).sum())
            else:
                counts[0] += int(standing(model, batch).right.sum())
    clean, robust = (count / len(split) for count in world.totals(counts))
    return {"clean": clean, "robust": robust} if attack else {"clean": clean}


def validate(
    model: Classifier, splits: Mapping[str, Split], recipe: Recipe, objective: Objective, world: World
) -> dict[str, Any]:
    """Clean and, if the recipe names an attack, robust accuracy on each split, as `NAME_clean` and `NAME_robust`."""
    settings = recipe.validate_
    attack = attacks.build(settings.attack.plain(), "validate.attack") if settings.attack else None
    threat = validation_threat(recipe, objective) if attack else None
    record: dict[str, Any] = {}
    for name, split in splits.items():
        record |= {f"{name}_n": len(split)} if name == "val" or len(split) else {}
        if len(split):  # data with a handful of images a class have none to spare for validation
            found = accuracies(model, split, attack, threat, recipe.seed, world)
            record |= {f"{name}_{what}": value for what, value in found.items()}
    return record


def validation_threat(recipe: Recipe, objective: Objective) -> Threat:
    """The recipe's own, or the one that is trained against."""
    if recipe.validate_.threat is not None:
        return Threat(**check_arguments(Threat, recipe.validate_.threat, "validate.threat"))
    threat = getattr(objective, "threat", None)
    if not isinstance(threat, Threat):
        raise BastionError("validate.threat: missing; the objective has none of its own, so the attack needs one here")
    return threat

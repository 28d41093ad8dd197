"""A recipe for what somebody has as objects: a network, tensors or a torch Dataset, an objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from bastion.data import datasets
from bastion.data.split import train_val_split
from bastion.data.user_data import as_data
from bastion.errors import BastionError, shown
from bastion.models import Classifier
from bastion.models.checkpoint import OWN
from bastion.models.columns import num_outputs
from bastion.models.complexity import parameters
from bastion.models.wrap import wrap
from bastion.recipe import Recipe, load_recipe
from bastion.recipe_files import Changes
from bastion.settings_text import keys_of
from bastion.types import DataSet, Objective

Name = str | Mapping[str, Any]  # of a plug-in, perhaps with settings


@dataclass(frozen=True)
class UserObjects:
    """What was given as an object; the recipe can only say which."""

    model: Classifier | None = None
    data: DataSet | None = None

    @property
    def is_own(self) -> bool:
        """Is the network one that no name builds?"""
        return self.model is not None and self.model.spec is not None and self.model.spec.get("name") == OWN


def recipe_for(
    recipe: Recipe | str | Path | Mapping[str, Any] | None,
    changes: Changes,
    *,
    model: nn.Module | Name | None,
    data: Any,
    objective: Objective | Name | None,
    epochs: int | None,
) -> tuple[Recipe, UserObjects]:
    """The recipe with these in place of its own; without one, bastion's defaults, but images are not augmented."""
    if isinstance(recipe, nn.Module):
        raise BastionError("train: give a network as model=…, with data=…")
    parts = {"model": model, "data": data, "objective": objective, "epochs": epochs}
    if isinstance(recipe, Recipe):
        if changes or any(part is not None for part in parts.values()):
            raise BastionError("train: `changes` and parts are not for a Recipe object; pass its name or a mapping")
        return recipe, UserObjects()
    if recipe is None and (model is None or data is None):
        raise BastionError("train: give the name of a recipe (see `bastion list recipes`), or model=… and data=…")
    own_data, own_model, said = _data(data, model), None, dict[str, Any]()
    if isinstance(own_data, DataSet):
        said["data"] = {"name": own_data.name, "fingerprint": own_data.fingerprint}
    elif own_data is not None:
        said["data"] = own_data
    if isinstance(model, nn.Module):
        if own_data is None and recipe is not None:
            own_data = load_recipe(recipe, changes).data.plain()
        own_data = own_data if isinstance(own_data, DataSet) else datasets.build(own_data, "data")
        own_model = _classifier(model, own_data)
        said["model"] = {"name": OWN, "class": type(model).__qualname__, "parameters": parameters(own_model)}
        said["normalize"] = "none"
    elif model is not None:
        said["model"] = model
    if objective is not None or recipe is None:
        said["objective"] = objective or "standard"
    if epochs is not None:
        said["schedule"] = {"epochs": epochs}
    if recipe is None:
        said["augment"] = {"crop": "none", "hflip": 0}
    if recipe is None and isinstance(own_data, DataSet):
        said["batch"] = min(Recipe.model_fields["batch"].default, max(len(own_data.train), 1))
    objects = UserObjects(own_model, own_data if isinstance(own_data, DataSet) else None)
    return load_recipe({} if recipe is None else recipe, changes, said), objects


def setting_of_the_recipe(name: str, value: object) -> str:
    """Return how to change a setting of the recipe; empty if it has none of this name."""
    paths = [(keys.path, each.name) for keys in keys_of(Recipe) for each in keys.settings if each.name == name]
    having = [".".join(filter(None, path)) for path in paths if "[" not in path[0]]
    if not having:
        return ""
    return f'{name} is a setting of the recipe: changes={{"{having[0]}": {shown(value)}}}'


def _data(data: Any, model: Any) -> DataSet | dict[str, Any] | None:
    """Examples without splits are trained on, but for those that are held out to validate with."""
    if data is None or isinstance(data, DataSet):
        return data
    classes = partial(num_outputs, model) if isinstance(model, nn.Module) else lambda _: None
    found = as_data(data, num_classes=classes)
    if not isinstance(found, DataSet):
        return found
    train, val = (found.test.subset(rows.tolist()) for rows in train_val_split(found.test.labels))
    return replace(found, train=train, val=val, test=found.test.subset([]))


def _classifier(model: nn.Module, data: DataSet) -> Classifier:
    """Itself, or around a network that takes pixels as they are."""
    channels = data.shape[0]
    found = model
    if not isinstance(found, Classifier):
        found = wrap(model, mean=(0.0,) * channels, std=(1.0,) * channels, shape=data.shape)
    if found.num_classes != len(data.classes):
        raise BastionError(f"train: the network has {found.num_classes} outputs, the data {len(data.classes)} classes")
    found.spec = found.spec or {"name": OWN, "class": type(model).__qualname__}
    return found

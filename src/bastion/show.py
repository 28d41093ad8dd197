"""What `bastion show` and `bastion list` say."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bastion.errors import BastionError
from bastion.recipe import SHIPPED, Recipe, dump, load_recipe, load_suite, shipped

Rows = Iterator[tuple[str, str]]


def describe(target: str, changes: tuple[str, ...] = ()) -> str:
    """A run, a folder with a model, a recipe, or the name of a model family."""
    path = Path(target)
    if target.startswith("zoo/") or path.is_dir():
        return _describe_folder(target)
    if path.suffix in (".yaml", ".yml") or (SHIPPED / f"{target}.yaml").is_file():
        return _describe_recipe(load_recipe(target, changes))
    from bastion.models import models

    try:
        backbone = models.build(target)
    except BastionError as error:
        raise BastionError(f"show {target}: not a recipe, not a run or model folder; {error}") from error
    from bastion.models import Classifier

    flat = (0.0,) * backbone.shape[0], (1.0,) * backbone.shape[0]
    return _describe_model(Classifier(backbone, *flat))


def _describe_folder(target: str) -> str:
    from bastion.models.checkpoint import read_card
    from bastion.models.load import load, locate

    card = read_card(locate(target)).model_dump(mode="json", include={"model", "mean", "std", "resize", "about"})
    return f"{_describe_model(load(target))}\n\n{dump(card)}"


def _describe_recipe(recipe: Recipe) -> str:
    from bastion.data import datasets
    from bastion.training.trainer import build_model, build_objective

    build_objective(recipe)
    text = f"{dump(recipe.resolved())}\nhash         {recipe.hash()}"
    try:
        data = datasets.build(recipe.data.plain(), "data")
    except BastionError as error:
        return f"{text}\nmodel        not built: {error}"
    images = min(recipe.train_limit or len(data.train), len(data.train)) * recipe.schedule.epochs
    cost = f"training     {images:,} images in {recipe.schedule.epochs} epochs"
    return "\n".join([text, cost, _describe_model(build_model(recipe, data))])


def _describe_model(model: Any) -> str:
    from bastion.models import complexity

    rows = {
        "input": "×".join(map(str, model.shape)),
        "classes": str(model.num_classes),
        "parameters": f"{complexity.parameters(model):,}",
        "MACs": f"{complexity.macs(model) / 1e9:.3f} G per image (multiply-accumulates, the papers' FLOPs)",
    }
    try:
        names = [block.name for block in model.blocks()]
        rows["blocks"] = f"{len(names)}: {names[0]} … {names[-1]}"
    except BastionError:
        rows["blocks"] = "none recognised"
    return "\n".join(f"{key:<12} {value}" for key, value in rows.items())


def _first_line(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "").partition("\n")[0]


def _registered(room: str, registry: str) -> Callable[[str], Rows]:
    def rows(pattern: str) -> Rows:
        found = getattr(importlib.import_module(room), registry)
        return ((name, _first_line(found.factory(name))) for name in found.names())

    return rows


def _models(pattern: str) -> Rows:
    from bastion.models import models
    from bastion.models.timm import timm_names

    for name in models.names():
        if name != "timm/*":
            yield name, _first_line(models.factory(name))
    if pattern == "*":
        yield "timm/NAME", f"any of timm's {len(timm_names())} models; see `bastion list models 'timm/vit*'`"
    else:
        yield from ((name, "") for name in timm_names())


def _recipes(pattern: str) -> Rows:
    return ((name, load_recipe(name).about.partition("\n")[0]) for name in shipped("recipes"))


def _suites(pattern: str) -> Rows:
    return ((name, load_suite(name).about.partition("\n")[0]) for name in shipped("suites"))


def _zoo(pattern: str) -> Rows:
    from bastion.models.load import zoo_names

    return ((name, "") for name in zoo_names())


KINDS: dict[str, Callable[[str], Rows]] = {
    "models": _models,
    "attacks": _registered("bastion.attacks", "attacks"),
    "objectives": _registered("bastion.training.objectives", "objectives"),
    "probes": _registered("bastion.probes", "probes"),
    "data": _registered("bastion.data", "datasets"),
    "recipes": _recipes,
    "suites": _suites,
    "zoo": _zoo,
}

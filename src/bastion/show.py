"""What `bastion show` and `bastion list` say."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bastion.errors import BastionError, did_you_mean
from bastion.recipe_files import headlines, is_recipe, parse_changes, shipped
from bastion.recipe_yaml import dump

if TYPE_CHECKING:
    from bastion.costs import RunPlan
    from bastion.models import Classifier
    from bastion.recipe import Recipe

Rows = Iterator[tuple[str, str]]
CONVENTION = (
    "a multiply-accumulate is 2 FLOP; a forward pass counts 1, one for the input's gradient 2, a training pass 3"
)


def describe(target: str, changes: tuple[str, ...] = (), *, timed: bool = False) -> str:
    """A run, a folder with a model, a recipe, or the name of a model family.

    `changes`, and a time on this machine, are for recipes: where a model has the name too, they tell which.
    """
    path = Path(target)
    is_model = target.startswith("zoo/") or path.is_dir()
    if is_recipe(target) and (changes or timed or not is_model):
        from bastion.recipe import load_recipe

        return _describe_recipe(load_recipe(target, changes), timed)
    if timed or (changes and is_model):
        known = did_you_mean(target, shipped("recipe"))
        raise BastionError(
            f"show {target}: --time, and --set but for a model's name, are for recipes; this is none{known}"
        )
    if is_model:
        return _describe_folder(target)
    from bastion.models import Classifier, checkpoint, complexity, models
    from bastion.registry import first_line

    try:
        backbone = checkpoint.build_backbone({"name": target, **parse_changes(changes)})
    except BastionError as error:
        raise BastionError(f"show {target}: not a recipe, not a run or model folder; {error}") from error
    flat = (0.0,) * backbone.shape[0], (1.0,) * backbone.shape[0]
    model = Classifier(backbone, *flat)
    try:
        macs = complexity.macs(model)
    except (AssertionError, RuntimeError, ValueError) as error:
        size = "×".join(map(str, model.shape))
        raise BastionError(f"show {target}: with these options it does not run on {size}: {error}") from error
    lines = [_describe_model(model, macs), _attention(model)]
    lines += [_row("from", backbone.paper)] if backbone.paper else []
    return "\n".join([*lines, _row("about", first_line(models.factory(target)))])


def _attention(model: Classifier) -> str:
    """As it is seen in a pass: how many maps, over what, and their size."""
    import torch

    from bastion.forward import in_mode
    from bastion.models.model_stats import attention_between

    try:
        with torch.no_grad(), in_mode(model, training=False), model.tap("attention") as taps:
            model(torch.zeros(1, *model.shape))
    except BastionError:
        return _row("attention", "none")
    shapes = list(dict.fromkeys("×".join(map(str, each.shape[1:])) for each in taps.attention.values()))
    between = attention_between(model.blocks())
    return _row("attention", f"between {between}: {len(taps.attention)} maps of heads×queries×keys {', '.join(shapes)}")


def _describe_folder(target: str) -> str:
    from bastion.models import complexity
    from bastion.models.checkpoint import read_card
    from bastion.models.load import load, locate

    card = read_card(locate(target)).model_dump(mode="json", include={"model", "mean", "std", "resize", "about"})
    model = load(target)
    return f"{_describe_model(model, complexity.macs(model))}\n\n{dump(card)}"


def _describe_recipe(recipe: Recipe, timed: bool) -> str:
    """All of it, and what it costs as far as that can be told."""
    from bastion.costs import images_per_second, plan_run

    plan = plan_run(recipe)
    lines = [dump(recipe.resolved()), _row("hash", recipe.hash())]
    lines += [_row("not here", note) for note in plan.notes]
    if plan.data:
        lines.append(_describe_data(plan))
    if plan.model:
        lines.append(_describe_model(plan.model, plan.macs))
    if plan.training.units:
        each = plan.training
        lines.append(_row("passes", f"{each}; {each.units:.4g} times a forward pass, for each image"))
        if plan.images:
            lines.append(_row("training", f"{plan.images:,} images in {recipe.schedule.epochs} epochs"))
        if plan.validated:
            lines.append(_row("validation", f"{plan.validated:,} images; {plan.validation} at most"))
    if plan.flops:
        lines.append(_row("total", f"{_scientific(plan.flops)} FLOP; {CONVENTION}"))
    if timed:
        if plan.notes:
            raise BastionError(f"show --time: training cannot be tried here; {plan.notes[0]}")
        rate = images_per_second(recipe)
        lines.append(_row("time", f"{_duration(plan.hours(rate))} on this machine, at {rate:.3g} images/s"))
    return "\n".join(lines)


def _describe_data(plan: RunPlan) -> str:
    from bastion.data.known import SIZES

    assert plan.data
    known = ["by what is known of it", SIZES[plan.data.name].about] if plan.outlined else []
    note = f" ({': '.join(filter(None, known))})" if known else ""
    train, val = len(plan.data.train), len(plan.data.val)
    return _row("data", f"{plan.data.name}: {train:,} images to train on, {val:,} held out{note}")


def _scientific(number: float) -> str:
    """6.8e18, as people write it."""
    mantissa, exponent = f"{number:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _duration(hours: float) -> str:
    """In the unit that suits it."""
    for unit, length in (("h", 1.0), ("min", 1 / 60)):
        if hours >= length:
            return f"{hours / length:,.1f} {unit}"
    return f"{hours * 3600:.3g} s"


def _describe_model(model: Classifier, macs: int) -> str:
    from bastion.models import complexity

    rows = {
        "input": "×".join(map(str, model.shape)),
        "classes": str(model.num_classes),
        "category": model.category or "not declared",
        "parameters": f"{complexity.parameters(model):,}",
        "MACs": f"{macs / 1e9:.3f} G per image (multiply-accumulates, the papers' FLOPs)",
    }
    try:
        blocks = model.blocks()
        attending = sum(block.attends for block in blocks)
        rows["blocks"] = f"{len(blocks)}: {blocks[0].name} … {blocks[-1].name}; {attending} with self-attention"
    except BastionError:
        rows["blocks"] = "not known"
    return "\n".join(_row(key, value) for key, value in rows.items())


def _row(key: str, value: str) -> str:
    return f"{key:<12} {value}"


def _registered(room: str, registry: str) -> Callable[[str], Rows]:
    def rows(pattern: str) -> Rows:
        from bastion.registry import first_line

        found = getattr(importlib.import_module(room), registry)
        return ((name, first_line(found.factory(name))) for name in found.names())

    return rows


def _models(pattern: str) -> Rows:
    from bastion.models import models
    from bastion.models.model_stats import stored
    from bastion.models.timm import timm_names
    from bastion.registry import first_line

    counted = stored()
    for name in models.names():
        if not name.endswith("/*"):
            yield name, counted[name].short() if name in counted else first_line(models.factory(name))
    if pattern == "*":
        yield "timm/NAME", f"any of timm's {len(timm_names())} models; see `bastion list models 'timm/vit*'`"
    else:
        yield from ((name, "") for name in timm_names())


def _zoo(pattern: str) -> Rows:
    from bastion.models.load import zoo_names
    from bastion.recipe import load_recipe

    for name in zoo_names():
        recipe = load_recipe(name)
        reached = [f"{probe} {100 * share:.0f} %" for probe, share in recipe.expect.items() if isinstance(share, float)]
        yield name, f"{recipe.about.partition(chr(10))[0]} {', '.join(reached)}"


KINDS: dict[str, Callable[[str], Rows]] = {
    "models": _models,
    "attacks": _registered("bastion.attacks", "attacks"),
    "objectives": _registered("bastion.training.objectives", "objectives"),
    "probes": _registered("bastion.probes", "probes"),
    "studies": _registered("bastion.studies", "studies"),
    "data": _registered("bastion.data", "datasets"),
    "recipes": lambda _: headlines("recipe"),
    "suites": lambda _: headlines("suite"),
    "zoo": _zoo,
}

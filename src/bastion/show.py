"""What `bastion show` and `bastion list` say."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bastion.costs import (
    CONVENTION,
    THIS_MACHINE,
    USUAL,
    UTILISATION,
    Fleet,
    check_utilisation,
    duration,
    fleet,
    flops,
    scientific,
)
from bastion.errors import BastionError, did_you_mean
from bastion.recipe_files import headlines, is_recipe, parse_changes, shipped
from bastion.recipe_yaml import dump

if TYPE_CHECKING:
    from bastion.models import Classifier
    from bastion.planning import Load
    from bastion.recipe import Recipe
    from bastion.types import DataSet, Objective

Rows = Iterator[tuple[str, str]]


def describe(
    target: str, changes: tuple[str, ...] = (), on: tuple[str, ...] = (), utilisation: float = UTILISATION
) -> str:
    """A run, a folder with a model, a recipe, or the name of a model family.

    `changes`, and devices that it is to run `on`, are for recipes: where a model has the name too, they tell which.
    """
    path = Path(target)
    is_model = target.startswith("zoo/") or path.is_dir()
    if is_recipe(target) and (changes or on or not is_model):
        from bastion.recipe import load_recipe

        return _describe_recipe(load_recipe(target, changes), on, check_utilisation(utilisation))
    if on or (changes and is_model):
        known = did_you_mean(target, shipped("recipe"))
        raise BastionError(
            f"show {target}: --on, and --set but for a model's name, are for recipes; this is none{known}"
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
    lines = [_describe_model(model, macs), _attention(model, backbone.attention)]
    lines += [_row("from", backbone.paper)] if backbone.paper else []
    return "\n".join([*lines, _row("about", first_line(models.factory(target)))])


def _attention(model: Classifier, kind: str | None) -> str:
    """As it is seen in a pass: how many maps, over what, and their size."""
    import torch

    from bastion.models.classifier import in_mode

    try:
        with torch.no_grad(), in_mode(model, training=False), model.tap("attention") as taps:
            model(torch.zeros(1, *model.shape))
    except BastionError:
        return _row("attention", "none")
    shapes = list(dict.fromkeys("×".join(map(str, each.shape[1:])) for each in taps.attention.values()))
    what = f"between {kind}: " if kind else ""
    return _row("attention", f"{what}{len(taps.attention)} maps of heads×queries×keys {', '.join(shapes)}")


def _describe_folder(target: str) -> str:
    from bastion.models import complexity
    from bastion.models.checkpoint import read_card
    from bastion.models.load import load, locate

    card = read_card(locate(target)).model_dump(mode="json", include={"model", "mean", "std", "resize", "about"})
    model = load(target)
    return f"{_describe_model(model, complexity.macs(model))}\n\n{dump(card)}"


def _describe_recipe(recipe: Recipe, on: tuple[str, ...], utilisation: float) -> str:
    """All of it, and what it costs as far as that can be told."""
    fleets = [None if name.lower() == THIS_MACHINE else fleet(name) for name in on] or [*USUAL]
    from bastion.planning import load_of, look_ahead, macs_of

    prospect = look_ahead(recipe)
    load, macs = load_of(prospect), macs_of(prospect)
    lines = [dump(recipe.resolved()), _row("hash", recipe.hash())]
    lines += [_row("not here", note) for note in prospect.notes]
    if prospect.data:
        lines.append(_describe_data(prospect.data, prospect.outlined))
    if prospect.model:
        lines.append(_describe_model(prospect.model, macs))
    if load:
        lines += _describe_load(load, recipe)
    if load and prospect.objective and prospect.data and prospect.model:
        total = load.flops(macs)
        lines.append(_row("total", f"{scientific(total)} FLOP; {CONVENTION}"))
        share = f"at {utilisation:g} of the peak; papers' own runs reached 0.01 to 0.04 (docs/costs.md)"
        lines.append(_row("plan", share if any(fleets) else "at the speed found; loading of images not counted"))
        for devices in fleets:
            if devices:
                lines.append(_on_devices(devices, total, recipe.precision, utilisation))
            else:
                step = flops(macs, (load.finding + load.learning).units, 1)
                lines.append(_on_this_machine(recipe, prospect.objective, prospect.data, step, total))
    return "\n".join(lines)


def _describe_data(data: DataSet, outlined: bool) -> str:
    from bastion.data.known import FACTS

    known = ["by what is known of it", FACTS[data.name].about] if outlined else []
    note = f" ({': '.join(filter(None, known))})" if known else ""
    return _row("data", f"{data.name}: {len(data.train):,} images to train on, {len(data.val):,} held out{note}")


def _describe_load(load: Load, recipe: Recipe) -> list[str]:
    each = load.training
    lines = [_row("passes", f"{each}; {each.units:.4g} times a forward pass, for each image")]
    if load.images:
        lines.append(_row("training", f"{load.images:,} images in {recipe.schedule.epochs} epochs"))
    if load.looked:
        lines.append(_row("validation", f"{load.looked:,} images; {load.looking} at most"))
    return lines


def _on_devices(devices: Fleet, total: float, precision: str, utilisation: float) -> str:
    peak, used = devices.device.peak(precision)
    hours = devices.hours(total, precision, utilisation)
    return _row("", f"{devices!s:<18}{duration(hours):>10}   {peak:g} TFLOP/s {used} each")


def _on_this_machine(recipe: Recipe, objective: Objective, data: DataSet, step: float, total: float) -> str:
    """`step`: the operations of one image in one step, which is what is timed."""
    from bastion.training.calibrate import calibrate

    rate = calibrate(recipe, objective, data, step)
    speed, how = step * rate.images, f"{rate.images:.3g} images/s in batches of {rate.batch}"
    return _row(
        "", f"{'this machine':<18}{duration(total / speed / 3600):>10}   {speed / 1e12:.3g} TFLOP/s, found: {how}"
    )


def _describe_model(model: Classifier, macs: int) -> str:
    from bastion.models import complexity

    rows = {
        "input": "×".join(map(str, model.shape)),
        "classes": str(model.num_classes),
        "parameters": f"{complexity.parameters(model):,}",
        "MACs": f"{macs / 1e9:.3f} G per image (multiply-accumulates, the papers' FLOPs)",
    }
    try:
        names = [block.name for block in model.blocks()]
        rows["blocks"] = f"{len(names)}: {names[0]} … {names[-1]}"
    except BastionError:
        rows["blocks"] = "none recognised"
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
    from bastion.models.figures import known
    from bastion.models.timm import timm_names
    from bastion.registry import first_line

    counted = known()
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

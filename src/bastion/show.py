"""`bastion show`: descriptions of models, recipes, suites, plug-ins and runs."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bastion.errors import BastionError, did_you_mean
from bastion.files import is_folder
from bastion.listing import KINDS, kinds_of
from bastion.plugins import PACKAGES
from bastion.recipe_files import is_recipe, is_suite, parse_changes, shipped
from bastion.recipe_yaml import dump
from bastion.run import Run

if TYPE_CHECKING:
    from bastion.costs import RunPlan
    from bastion.models import Classifier
    from bastion.recipe import Recipe
    from bastion.settings_text import Setting

CONVENTION = (
    "a multiply-accumulate is 2 FLOP; a forward pass counts 1, one for the input's gradient 2, a training pass 3"
)


# Kinds of plug-ins besides models: their registry, and how one is used.
PLUGINS = {
    "attacks": ("attacks", "bastion measure MODEL --attack {name} --norm linf --eps 8/255"),
    "loggers": ("loggers", "bastion train RECIPE --set loggers={name}"),
    "objectives": ("objectives", "bastion train RECIPE --set objective={name}"),
    "probes": ("probes", "in a suite: probes: {{LABEL: {{name: {name}, SETTING: VALUE}}}}"),
    "studies": ("studies", "in a suite: studies: {{LABEL: {{name: {name}, SETTING: VALUE}}}}"),
    "data": ("datasets", "bastion measure MODEL --data {name}:SETTING=VALUE,SETTING=VALUE"),
}


def describe(target: str, changes: tuple[str, ...] = (), *, timed: bool = False) -> str:
    """Describe anything that `bastion list` names, a run, a folder with a model, or a file.

    `changes` and `timed` are for recipes; with them a name that a model has too means the recipe.
    """
    is_model = target.startswith("zoo/") or is_folder(target)
    if is_recipe(target) and (changes or timed or not (is_model or is_suite(target))):
        from bastion.recipe import load_recipe

        return _describe_recipe(load_recipe(target, changes), timed)
    if timed or (changes and is_model):
        known = did_you_mean(target, shipped("recipe"))
        raise BastionError(
            f"show {target}: --time, and --set but for a model's name, are for recipes; this is none{known}"
        )
    if is_model:
        return _describe_folder(target)
    kinds = [kind for kind in kinds_of(target) if kind in (*PLUGINS, "suites")]
    if is_suite(target):
        kinds.append("suites")
    texts = [
        _describe_suite(target, changes) if kind == "suites" else _describe_plugin(kind, target)
        for kind in dict.fromkeys(kinds)
    ]
    return "\n\n\n".join(texts) if texts else _describe_family(target, changes)


class Plugin(NamedTuple):
    """The description of a plug-in, here and on the reference pages of the documentation."""

    about: str
    settings: list[Setting]
    facts: Mapping[str, str]  # of a probe or study: what each column means
    use: tuple[str, ...]  # on the command line or in a suite, and in Python


def plugin(kind: str, name: str) -> Plugin:
    from bastion.settings_text import settings_of

    registry, use = PLUGINS[kind]
    factory = getattr(importlib.import_module(PACKAGES[registry]), registry).factory(name)
    settings = settings_of(factory)
    line = use.format(name=name)
    lines = [line if settings else line.partition(":SETTING")[0]]
    if kind in ("probes", "studies") and not is_suite(name) and all(each.default for each in settings):
        lines.insert(0, f"bastion measure MODEL --suite {name}")
    lines += [f"from {PACKAGES[registry]} import {factory.__name__}"] if inspect.isclass(factory) else []
    facts = {name: str(each) for name, each in getattr(factory, "facts", {}).items()}
    return Plugin(inspect.cleandoc(factory.__doc__ or ""), settings, facts, tuple(lines))


def _describe_plugin(kind: str, name: str) -> str:
    """Describe a plug-in: its docstring, settings and use."""
    from bastion.settings_text import settings_table

    found = plugin(kind, name)
    lines = [f"{KINDS[kind].singular} {name}", "", found.about, ""]
    lines += [settings_table(found.settings) if found.settings else "It has no settings.", ""]
    if found.facts:
        width = max(map(len, found.facts)) + 2
        lines += ["What it tells:", *(f"{column:<{width}}{meaning}" for column, meaning in found.facts.items()), ""]
    if kind == "data" and all(each.default for each in found.settings):
        lines += [*_describe_images(name), ""]
    return "\n".join([*lines, *found.use])


def _describe_images(name: str) -> list[str]:
    """Describe the images of a data set, if it is available."""
    from bastion.data import datasets

    try:
        data = datasets.build(name)
    except BastionError as error:
        return [_row("not here", str(error))]
    sizes = {split: len(data.split(split)) for split in ("train", "val", "test")}
    return [
        _row("images", ", ".join(f"{count:,} {split}" for split, count in sizes.items() if count)),
        _row("size", "×".join(map(str, data.shape))),
        _row("classes", _counted(data.classes)),
    ]


def _counted(names: Sequence[str], most: int = 12) -> str:
    """Format the number of names, and the first of them."""
    return f"{len(names)}: {', '.join(names[:most])}{', …' if len(names) > most else ''}"


def _describe_suite(name: str, changes: tuple[str, ...]) -> str:
    """Describe a suite: its resolved YAML, and the rows of its table."""
    from bastion.suite import load_suite

    suite = load_suite(name, changes)
    rows = [case.label for case in suite.cases()] + list(suite.aggregates)
    content = {key: value for key, value in suite.resolved().items() if key != "about"}
    lines = [f"suite {name}", "", suite.about.strip(), "", dump(content, fractions=True).strip(), ""]
    return "\n".join([*lines, _row("rows", _counted(rows)), "", f"bastion measure MODEL --suite {name} --data DATA"])


def _describe_family(target: str, changes: tuple[str, ...]) -> str:
    """Describe a model by its name, with random weights."""
    from bastion.models import Classifier, checkpoint, complexity, models
    from bastion.registry import first_line

    try:
        backbone = checkpoint.build_backbone({"name": target, **parse_changes(changes)})
    except BastionError as error:
        raise BastionError(_unknown(target, error)) from error
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


def _unknown(target: str, error: BastionError) -> str:
    """Return the message for a wrong option of a model, or an unknown name."""
    if "unknown model" not in str(error):
        return f"show {target}: {error}"
    known = [row[0] for kind in KINDS.values() for row in kind.rows("*")]
    return f"show {target}: nothing that `bastion list` names, no run and no folder{did_you_mean(target, known)}"


def _attention(model: Classifier) -> str:
    """Describe the attention maps of a forward pass: their number, kind and size."""
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
    """Describe a trained model, its measurements, or both."""
    from bastion.measuring.facts import read_measurements

    run = Run(Path(target))
    measured = read_measurements(run) if run.exists() else []
    lines = [] if measured and not _has_model(run) else [_describe_trained(target)]
    for facts in measured:
        lines += [facts.table(), _row("measured", f"{facts.about.created} by `{facts.about.command}`"), ""]
    return "\n".join(lines).rstrip()


def _has_model(run: Run) -> bool:
    return any((folder / "card.json").is_file() for folder in (run.folder, run.model))


def _describe_trained(target: str) -> str:
    from bastion.models import complexity
    from bastion.models.checkpoint import read_card
    from bastion.models.load import load, locate

    card = read_card(locate(target)).model_dump(mode="json", include={"model", "mean", "std", "resize", "about"})
    model = load(target)
    return f"{_describe_model(model, complexity.macs(model))}\n\n{dump(card)}"


def _describe_recipe(recipe: Recipe, timed: bool) -> str:
    """Describe a recipe: its resolved YAML, and its cost as far as it is known."""
    from bastion.costs import images_per_second, plan_run

    plan = plan_run(recipe)
    lines = [dump(recipe.resolved(), fractions=True), _row("hash", recipe.hash())]
    lines += [_row("not here", note) for note in plan.notes]
    if plan.data:
        lines.append(_describe_data(plan))
    if plan.model:
        lines.append(_describe_model(plan.model, plan.macs))
    if plan.training.units:
        each = plan.training
        lines.append(_row("passes", f"{each}; {each.units:.4g} times a forward pass, for each image"))
        if plan.images:
            lines.append(_row("training", f"{plan.images:,} images in {_count(recipe.schedule.epochs, 'epoch')}"))
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
    """Format as 6.8e18."""
    mantissa, exponent = f"{number:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _duration(hours: float) -> str:
    """Format in hours, minutes or seconds."""
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


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _row(key: str, value: str) -> str:
    return f"{key:<12} {value}"

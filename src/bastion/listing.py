"""`bastion list`: names with a line on each, without importing torch."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bastion import plugins
from bastion.errors import BastionError, did_you_mean
from bastion.recipe_files import headlines

Rows = Iterator[tuple[str, ...]]
STATS = plugins.ROOT / "models" / "model_stats.json"
ZOO = plugins.ROOT / "zoo"


class Kind(NamedTuple):
    """A kind of thing to list."""

    singular: str
    about: str
    rows: Callable[[str], Rows]  # rows whose names may match a pattern
    columns: tuple[str, ...] = ("name", "about")


def listed(kind: str, pattern: str = "*") -> list[tuple[str, ...]]:
    """Return the rows whose name matches; a pattern without wildcards matches the names that contain it."""
    if kind not in KINDS:
        raise BastionError(f"list: unknown kind '{kind}'{did_you_mean(kind, KINDS)}")
    wanted = pattern if set(pattern) & set("*?[") else f"*{pattern}*"
    rows = [row for row in KINDS[kind].rows(wanted) if fnmatch.fnmatchcase(row[0], wanted)]
    if not rows:
        near = did_you_mean(pattern, [row[0] for row in KINDS[kind].rows("*")])
        raise BastionError(f"list: no {KINDS[kind].singular} matches '{pattern}'{near}")
    return rows


def kinds_of(name: str) -> list[str]:
    """Return the kinds that have this name; a name may be a probe's and a suite's."""
    return [kind for kind, known in KINDS.items() if any(row[0] == name for row in known.rows(name))]


def zoo_names() -> list[str]:
    return sorted(f"zoo/{card.parent.relative_to(ZOO).as_posix()}" for card in ZOO.rglob("card.json"))


def timm_names() -> list[str]:
    """Return timm's model names, read from its files, as importing it takes seconds."""
    spec = importlib.util.find_spec("timm")
    folders = [Path(each) / "models" for each in (spec and spec.submodule_search_locations) or ()]
    texts = [path.read_text(errors="replace") for folder in folders for path in folder.glob("*.py")]
    return sorted(f"timm/{name}" for text in texts for name in re.findall(r"^@register_model\ndef (\w+)\(", text, re.M))


def _plugins(registry: str, _: str) -> Rows:
    yield from plugins.headlines(registry)


def _models(pattern: str) -> Rows:
    counted = json.loads(STATS.read_text())
    others = {name: about for name, about in plugins.headlines("models") if not name.endswith("/*")}
    for name in sorted(counted.keys() | others.keys()):
        yield (name, *_stats(counted[name])) if name in counted else (name, "", "", "", others[name])
    if pattern == "*":
        yield "timm/NAME", "", "", "", f"any of timm's {len(timm_names())}: `bastion list models 'timm/*'`"
    else:
        yield from ((name, "", "", "", "") for name in timm_names())


def _stats(counted: dict[str, Any]) -> tuple[str, ...]:
    size = "×".join(map(str, counted["shape"][1:]))
    cost = f"{counted['parameters'] / 1e6:.1f} M", f"{counted['macs'] / 1e9:.2f} G"
    return *cost, size, counted["paper"].partition(",")[0]


def _zoo(_: str) -> Rows:
    from bastion.recipe import load_recipe

    for name in zoo_names():
        recipe = load_recipe(name)
        reached = [f"{probe} {100 * share:.0f} %" for probe, share in recipe.expect.items() if isinstance(share, float)]
        yield name, f"{recipe.about.partition(chr(10))[0]} {', '.join(reached)}"


KINDS = {
    "attacks": Kind("attack", "find adversarial examples", partial(_plugins, "attacks")),
    "data": Kind("data set", "images with labels to train and measure on", partial(_plugins, "datasets")),
    "loggers": Kind("logger", "where numbers of a training run go", partial(_plugins, "loggers")),
    "models": Kind("model", "architectures", _models, ("name", "parameters", "MACs", "input", "from")),
    "objectives": Kind("objective", "what training minimises, on which inputs", partial(_plugins, "objectives")),
    "probes": Kind("probe", "what is measured of a model, image by image", partial(_plugins, "probes")),
    "recipes": Kind("recipe", "all that decides a training run: `bastion train NAME`", lambda _: headlines("recipe")),
    "studies": Kind("study", "what is measured of a model as a whole", partial(_plugins, "studies")),
    "suites": Kind(
        "suite",
        "probes and studies measured together: `bastion measure MODEL --suite NAME`",
        lambda _: headlines("suite"),
    ),
    "zoo": Kind("zoo model", "trained models that come with bastion", _zoo),
}

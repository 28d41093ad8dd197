"""JSON schemas of recipes and suites, with every plug-in's settings, for editors to complete and check YAML."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from bastion.attacks import attacks
from bastion.data import datasets
from bastion.models import models
from bastion.probes import probes
from bastion.recipe import Recipe
from bastion.registry import Registry
from bastion.settings import REGISTRY
from bastion.settings_text import help_texts
from bastion.studies import studies
from bastion.suite import Role, Suite
from bastion.training.loggers import loggers
from bastion.training.objectives import objectives

REGISTRIES: dict[str, Registry[Any]] = {
    registry.kind: registry for registry in (attacks, datasets, loggers, models, objectives, probes, studies)
}
FRACTION = {
    "type": "string",
    "pattern": r"^\s*[-+.\d]+(e[-+]?\d+)?\s*/\s*[-+.\d]+\s*$",
}  # 8/255, a number in bastion's YAML


def schemas() -> dict[str, dict[str, Any]]:
    """Return the schemas of `recipe` and `suite`."""
    return {"recipe": _schema(Recipe), "suite": _schema(Suite)}


def _schema(model: type[Recipe | Suite]) -> dict[str, Any]:
    own = model.model_json_schema()
    parents = {"type": "string", "description": "The file or files that this one extends."}
    own["properties"]["extends"] = {"anyOf": [parents, {"type": "array", "items": parents}]}
    parts, waiting = own.setdefault("$defs", {}), set(_registries(own))
    while waiting:
        kind = waiting.pop()
        parts[kind] = _with_help(REGISTRIES[kind])
        parts |= parts[kind].pop("$defs")
        waiting |= set(_registries(parts)) - parts.keys()
    for form in (*parts.get("probe", {}).get("anyOf", ()), *parts.get("study", {}).get("anyOf", ())):
        if "properties" in form:
            form["properties"] |= {"role": {"enum": list(get_args(Role))}, "data": {"type": "object"}}
    finished: dict[str, Any] = _finished(own)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **finished}


def _with_help(registry: Registry[Any]) -> dict[str, Any]:
    """Return the registry's schema with the help text of every setting."""
    schema = registry.schema()
    for form in schema["anyOf"][1:]:
        for name, text in help_texts(registry.factory(form["title"])).items():
            if name in form["properties"]:
                form["properties"][name].setdefault("description", text)
    return schema


def _registries(part: Any) -> Iterator[str]:
    """Yield the kinds of plug-ins that a schema refers to."""
    if isinstance(part, dict):
        yield from [part[REGISTRY]] if REGISTRY in part else []
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from _registries(inner)


def _finished(part: Any) -> Any:
    """Add references to the schemas of plug-ins, and allow fractions for numbers.

    Nothing is required: a missing key may be in the file that this one extends, or be set by an axis.
    """
    if isinstance(part, list):
        return [_finished(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    if REGISTRY in part:
        return {"$ref": f"#/$defs/{part[REGISTRY]}"}
    if part.get("type") == "number":
        described = {key: part[key] for key in ("title", "description", "default") if key in part}
        return {**described, "anyOf": [{key: part[key] for key in part if key not in described}, FRACTION]}
    return {key: _finished(inner) for key, inner in part.items() if key != "required"}

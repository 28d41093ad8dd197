"""Where recipes and suites are found, what they extend, and how one is laid over the other. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from bastion.errors import BastionError, did_you_mean, shown
from bastion.files import read_text
from bastion.papers import Row, read_paper
from bastion.recipe_yaml import read, read_fractions, read_value

if TYPE_CHECKING:
    from pydantic import BaseModel

SHIPPED = Path(__file__).parent / "recipes"
PAPERS = SHIPPED / "papers"
NO_RECIPES = {"base", "papers", "suites"}  # folders
SUFFIXES = (".yaml", ".yml")
DEEPEST = 50  # files that extend one another

Kind = Literal["recipe", "suite"]
Changes = Mapping[str, Any] | Iterable[str] | str  # `{"a.b": 1}`, `["a.b=1"]` or `"a.b=1"`


def shipped(kind: Kind) -> list[str]:
    """Names of what comes with the package."""
    return [name for name, _ in headlines(kind)]


def headlines(kind: Kind) -> Iterator[tuple[str, str]]:
    """Names of what comes with the package, each with the first line of its `about`. Nothing is resolved for it."""
    if kind == "suite":
        yield from _files(SHIPPED / "suites")
        return
    folders = [path for path in SHIPPED.iterdir() if path.is_dir() and path.name not in NO_RECIPES]
    for path in sorted([*folders, *PAPERS.glob("*.yaml")], key=lambda path: path.stem):
        own = _files(path) if path.is_dir() else ((name, row.about) for name, row in read_paper(path).rows.items())
        yield from ((f"{path.stem}/{name}", about) for name, about in own)


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*.yaml")):
        yield path.stem, str(_read(path).get("about", "")).partition("\n")[0]


def is_recipe(name: str) -> bool:
    """Is it the name of a shipped recipe, or of a file that may hold one?"""
    return Path(name).suffix in SUFFIXES or _shipped(name, "recipe") is not None


def is_suite(name: str) -> bool:
    """Is it the name of a shipped suite, or of a file that has probes or studies?"""
    if Path(name).suffix in SUFFIXES and os.path.isfile(name):
        return bool({"probes", "studies"} & _read(Path(name)).keys())
    return _shipped(name, "suite") is not None


class Files:
    """Recipes, or suites, on top of what they extend. Each file is read once, however often it is extended."""

    def __init__(self, kind: Kind, schema: type[BaseModel]) -> None:
        self.kind, self.schema = kind, schema
        self.done: dict[str, dict[str, Any]] = {}
        self.waiting: list[str] = []  # for what they extend

    def named(self, name: str, child: Path | None = None) -> dict[str, Any]:
        """By shipped name or path; that of a parent may be relative to the folder of the child that extends it."""
        found = self._find(name, child)
        key = name if isinstance(found, Row) else str(found)
        if key in self.waiting or len(self.waiting) > DEEPEST:
            trouble = "goes round in a circle" if key in self.waiting else f"is more than {DEEPEST} files deep"
            chain = " -> ".join(Path(each).stem for each in [*self.waiting, key][-10:])
            raise BastionError(f"{key}: `extends` {trouble}: {chain}")
        if key not in self.done:
            self.waiting.append(key)
            self.done[key] = self._row(name, found) if isinstance(found, Row) else self.extended(_read(found), found)
            self.waiting.pop()
        return self.done[key]

    def extended(self, content: Mapping[str, Any], where: Path) -> dict[str, Any]:
        """The content on top of what it extends."""
        content = dict(content)
        parents = content.pop("extends", [])
        parents = [parents] if isinstance(parents, str) else parents
        if not isinstance(parents, list) or len(parents) > DEEPEST:
            raise BastionError(
                f"{where}: extends: expected the name of a recipe or a list of at most {DEEPEST}, got {shown(parents)}"
            )
        result: dict[str, Any] = {}
        for parent in parents:
            result = merge(result, self.named(str(parent), where), self.schema)
        for own in ("about", "expect"):  # what is said of a parent is not true of its child
            result.pop(own, None)
        return merge(result, content, self.schema)

    def _row(self, name: str, row: Row) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for part in row.contents:
            result = merge(result, self.extended(part, row.paper.path), self.schema)
        first = row.first
        kind, _, start = str((result.get("init") or {}).get("from", "")).partition("/")
        if kind == "runs":
            first.append(f"bastion train {start} --run runs/{start}")
        elif kind == "weights":
            whose = row.paper.weights.get(start, f"timm's {start}")
            first.append(f"import {whose} to weights/{start}")
        lines = [row.about, *(f"First: {each}." for each in first), f"bastion train {name}"]
        return {
            **result,
            "about": "\n".join(lines) + "\n",
            "expect": row.paper.expected(row.name) or result.get("expect", {}),
        }

    def _find(self, name: str, child: Path | None) -> Path | Row:
        if found := _shipped(name, self.kind):
            return found
        for path in (*([child.parent / name] if child else []), Path(name)):
            if path.suffix in SUFFIXES and os.path.isfile(path):
                return path
        where = f"{child}: extends: " if child else ""
        known = did_you_mean(name, shipped(self.kind))
        raise BastionError(f"{where}no {self.kind} '{name}': neither shipped with bastion nor a .yaml file{known}")


def _shipped(name: str, kind: Kind) -> Path | Row | None:
    """The file, or the row of a paper. A name may be anything: too long for a file, or with a zero in it."""
    folder, _, rest = name.partition("/")
    paper = PAPERS / f"{folder}.yaml"
    if kind == "recipe" and rest and os.path.isfile(paper):
        return read_paper(paper).rows.get(rest)
    if kind == "recipe" and folder in ("papers", "suites"):
        return None
    path = SHIPPED / ("suites" if kind == "suite" else "") / f"{name}.yaml"
    return path if os.path.isfile(path) else None


def _read(path: Path) -> dict[str, Any]:
    return read(read_text(path), str(path))


def parse_changes(changes: Changes, schema: Any = Any) -> dict[str, Any]:
    """`["a.b=1", …]`, `"a.b=1"` or `{"a.b": 1}` as what a file would say."""
    result: dict[str, Any] = {}
    for change in [changes] if isinstance(changes, str) else changes:
        where = f"--set {shown(change, quoted=not str(change).isprintable())}"
        path, equals, text = (change, "=", "") if isinstance(changes, Mapping) else change.partition("=")
        if not equals or not all(path.split(".")) or path.count(".") > DEEPEST or not path.isprintable():
            raise BastionError(f"{where}: expected KEY.KEY=VALUE, such as optimizer.lr=1e-3")
        value = read_fractions(changes[change]) if isinstance(changes, Mapping) else read_value(text, where)
        result = merge(result, nested(path, value), schema)
    return result


def nested(path: str, value: Any) -> dict[str, Any]:
    """`a.b` and 1 as {"a": {"b": 1}}."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def merge(old: Mapping[str, Any], new: Mapping[str, Any], schema: Any = Any) -> dict[str, Any]:
    """`new` over `old`, key by key. What is chosen by name and gets another name loses its old parameters.

    The schema tells what is chosen by name, as plug-ins are; inside them, and without a schema, whatever has a name is.
    """
    return {**old, **{key: _over(old.get(key), value, _below(schema, key)) for key, value in new.items()}}


def _over(old: Any, new: Any, hint: Any) -> Any:
    by_name = _by_name(hint)
    if by_name and isinstance(old, str) and isinstance(new, Mapping) and new:
        old = {"name": old}  # the short form of a plug-in, given parameters
    if by_name and isinstance(new, str) and isinstance(old, Mapping) and "name" not in old and hint is not Any:
        new = {"name": new}  # parameters, given the plug-in that they are for
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    renamed = by_name and "name" in old and new.get("name", old["name"]) != old["name"]
    return new if renamed else merge(old, new, hint)


def _by_name(hint: Any) -> bool:
    """Must it have a name? The keys of an optimizer or a schedule are the same whatever its name."""
    fields = [option.model_fields.get("name") for option in _options(hint) if _is_section(option)]
    return hint is Any or any(field is not None and field.is_required() for field in fields)


def _below(hint: Any, key: str) -> Any:
    """The type of what stands under a key; `Any` where the schema leaves that open."""
    for option in _options(hint):
        if _is_section(option):
            for name, field in option.model_fields.items():
                if key in (name, field.alias):
                    return field.annotation
        elif get_origin(option) is dict:
            return get_args(option)[1]
    return Any


def _options(hint: Any) -> Iterator[Any]:
    """A type, or the members of a union; one or several of a kind are merged alike."""
    inner = get_args(hint)
    if get_origin(hint) in (dict, Literal) or not inner:
        yield hint
    else:
        for each in inner[:1] if get_origin(hint) is Annotated else inner:
            yield from _options(each)


def _is_section(hint: Any) -> bool:
    return hasattr(hint, "model_fields")

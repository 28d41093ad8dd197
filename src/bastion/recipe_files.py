"""Finds recipe and suite files, resolves `extends`, and merges them. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from bastion import plugins
from bastion.errors import BastionError, did_you_mean, shown
from bastion.files import read_text
from bastion.papers import Row, read_paper
from bastion.recipe_yaml import read, read_fractions, read_spec, read_value

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
    """Return the names of the shipped files."""
    return [name for name, _ in headlines(kind)]


def headlines(kind: Kind) -> Iterator[tuple[str, str]]:
    """Yield the names of the shipped files with the first line of their `about`, without resolving them."""
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
    """Whether it is the name of a shipped recipe, or of a YAML file."""
    return Path(name).suffix in SUFFIXES or _shipped(name, "recipe") is not None


def is_suite(name: str) -> bool:
    """Whether it is the name of a shipped suite, or of a file with probes or studies."""
    if Path(name).suffix in SUFFIXES and os.path.isfile(name):
        return bool({"probes", "studies"} & _read(Path(name)).keys())
    return _shipped(name, "suite") is not None


class Files:
    """Reads recipes or suites with what they extend; each file is read once."""

    def __init__(self, kind: Kind, schema: type[BaseModel]) -> None:
        self.kind, self.schema = kind, schema
        self.done: dict[str, dict[str, Any]] = {}
        self.waiting: list[str] = []  # being resolved, to detect cycles

    def named(self, name: str, child: Path | None = None) -> dict[str, Any]:
        """Read a file by shipped name or path, which may be relative to the folder of the child that extends it.

        The name of a probe or study that no suite has is a suite of it alone.
        """
        found = self._find(name, child)
        if isinstance(found, dict):
            return found
        key = name if isinstance(found, Row) else str(found)
        if key in self.waiting or len(self.waiting) > DEEPEST:
            problem = "goes round in a circle" if key in self.waiting else f"is more than {DEEPEST} files deep"
            chain = " -> ".join(Path(each).stem for each in [*self.waiting, key][-10:])
            raise BastionError(f"{key}: `extends` {problem}: {chain}")
        if key not in self.done:
            self.waiting.append(key)
            self.done[key] = self._row(name, found) if isinstance(found, Row) else self.extended(_read(found), found)
            self.waiting.pop()
        return self.done[key]

    def extended(self, content: Mapping[str, Any], where: Path) -> dict[str, Any]:
        """Merge the content over what it extends."""
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
        for own in ("about", "expect"):  # describe the parent only
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

    def _find(self, name: str, child: Path | None) -> Path | Row | dict[str, Any]:
        if found := _shipped(name, self.kind):
            return found
        for path in (*([child.parent / name] if child else []), Path(name)):
            if path.suffix in SUFFIXES and os.path.isfile(path):
                return path
        measured = _probes_and_studies() if self.kind == "suite" else {}
        if name in measured:
            return {measured[name]: {name: name}}
        where, others = f"{child}: extends: " if child else "", ", probe or study" if measured else ""
        known = did_you_mean(name, [*shipped(self.kind), *measured])
        if self.kind == "suite" and not known and name in dict(plugins.headlines("attacks")):
            known = f"; it is an attack: `--attack {name}`, in Python bastion.evaluate(model, data, '{name}')"
        known = known or f"; see `bastion list {self.kind}s`"
        raise BastionError(
            f"{where}no {self.kind} '{name}': neither shipped with bastion nor a .yaml file{others}{known}"
        )


def _probes_and_studies() -> dict[str, str]:
    """Return the section of a suite that each probe and study stands in, by name."""
    return {name: kind for kind in ("probes", "studies") for name, _ in plugins.headlines(kind)}


def _shipped(name: str, kind: Kind) -> Path | Row | None:
    """Return the shipped file or the row of a paper. `os.path.isfile` accepts any name, also an invalid one."""
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


def parse_changes(changes: Changes, schema: Any = Any, *, once: bool = False) -> dict[str, Any]:
    """Parse `["a.b=1", …]`, `"a.b=1"` or `{"a.b": 1}` into the nested content of a file.

    Of a key given twice the last value counts; with `once` that is refused.
    """
    result: dict[str, Any] = {}
    seen: set[str] = set()
    for change in [changes] if isinstance(changes, str) else changes:
        where = f"--set {shown(change, quoted=not str(change).isprintable())}"
        path, equals, text = (change, "=", "") if isinstance(changes, Mapping) else change.partition("=")
        if not equals or not all(path.split(".")) or path.count(".") > DEEPEST or not path.isprintable():
            raise BastionError(f"{where}: expected KEY.KEY=VALUE, such as optimizer.lr=1e-3")
        if once and path in seen:
            raise BastionError(f"{where}: {path} is given twice; for several values give a list: {path}=[…,…]")
        seen.add(path)
        value = read_fractions(changes[change]) if isinstance(changes, Mapping) else read_value(text, where)
        result = merge(result, nested(path, value), schema)
    return result


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return {"a": {"b": 1}} for `a.b` and 1."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def merge(old: Mapping[str, Any], new: Mapping[str, Any], schema: Any = Any) -> dict[str, Any]:
    """Merge `new` over `old`, key by key. A plug-in whose name changes loses its old parameters.

    The schema tells which sections are plug-ins; inside them, and without a schema, every section with a name is.
    """
    return {**old, **{key: _over(old.get(key), value, _below(schema, key)) for key, value in new.items()}}


def _over(old: Any, new: Any, hint: Any) -> Any:
    by_name = _by_name(hint)
    if by_name and isinstance(old, str) and isinstance(new, Mapping) and new:
        old = read_spec(old)  # the short form of a plug-in, given parameters
    if by_name and isinstance(new, str) and isinstance(old, Mapping) and "name" not in old and hint is not Any:
        new = read_spec(new)  # parameters, given the plug-in that they are for
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    renamed = by_name and "name" in old and new.get("name", old["name"]) != old["name"]
    return new if renamed else merge(old, new, hint)


def _by_name(hint: Any) -> bool:
    """Whether a name is required, as of plug-ins; an optimizer or a schedule has the same keys for all names."""
    fields = [option.model_fields.get("name") for option in _options(hint) if _is_section(option)]
    return hint is Any or any(field is not None and field.is_required() for field in fields)


def _below(hint: Any, key: str) -> Any:
    """Return the type of a key's value; `Any` if the schema leaves it open."""
    for option in _options(hint):
        if _is_section(option):
            for name, field in option.model_fields.items():
                if key in (name, field.alias):
                    return field.annotation
        elif get_origin(option) is dict:
            return get_args(option)[1]
    return Any


def _options(hint: Any) -> Iterator[Any]:
    """Yield the type, or the members of a union."""
    inner = get_args(hint)
    if get_origin(hint) in (dict, Literal) or not inner:
        yield hint
    else:
        for each in inner[:1] if get_origin(hint) is Annotated else inner:
            yield from _options(each)


def _is_section(hint: Any) -> bool:
    return hasattr(hint, "model_fields")

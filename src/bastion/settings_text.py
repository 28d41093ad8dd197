"""Tables of a plug-in's settings: name, default, type, and help text, which is the comment beside the setting."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import textwrap
import tokenize
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel

from bastion.recipe import Section
from bastion.registry import canonical
from bastion.settings import REGISTRY, arguments_schema
from bastion.suite import written

WIDEST = 18  # characters of a default in its own column


class Setting(NamedTuple):
    name: str
    default: str  # empty: required
    kind: str  # `whole number ≥ 0`
    help: str


class Keys(NamedTuple):
    """The keys of a recipe or suite, or of one section of it."""

    path: str  # of the section: `optimizer`, `axes.LABEL`, `extra[]`
    about: str
    settings: list[Setting]


def settings_of(factory: Callable[..., Any]) -> list[Setting]:
    """Return the keyword arguments of a class or function."""
    schema, texts, defaults = arguments_schema(factory), help_texts(factory), _defaults(factory)
    return [
        Setting(name, defaults.get(name, ""), _kind(part, schema), texts.get(name, ""))
        for name, part in schema.get("properties", {}).items()
    ]


def keys_of(model: type[BaseModel], path: str = "") -> Iterator[Keys]:
    """Yield the keys of a recipe or suite, then those of every section in it."""
    schema, texts = model.model_json_schema(), help_texts(model)
    sections = {name: found for name, field in model.model_fields.items() if (found := _section(field.annotation))}
    schema.setdefault("$defs", {}).update({each.__name__: {"const": "keys below"} for each in sections.values()})
    rows = []
    for name, field in model.model_fields.items():
        key = field.alias or name
        default = "" if field.is_required() else _written(field.get_default(call_default_factory=True))
        rows.append(Setting(key, default, _kind(schema["properties"][key], schema), texts.get(name, "")))
    yield Keys(path, inspect.cleandoc(model.__doc__ or ""), rows)
    for name, section in sections.items():
        field = model.model_fields[name]
        kinds: dict[Any, str] = {dict: ".LABEL", tuple: "[]"}
        several = kinds.get(get_origin(field.annotation), "")
        yield from keys_of(section, f"{path}{'.' if path else ''}{field.alias or name}{several}")


def _section(annotation: Any) -> type[Section] | None:
    """Return the section that a key holds, alone, in a list or dict, or beside other types."""
    if inspect.isclass(annotation) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section, get_args(annotation))), None)


def _written(value: Any) -> str:
    if isinstance(value, Section):
        return "those below"
    if isinstance(value, BaseModel):
        return value_text(value.model_dump(mode="json"))
    return f"[{', '.join(map(_written, value))}]" if isinstance(value, tuple) else value_text(value) or '""'


def settings_table(settings: list[Setting], width: int = 80) -> str:
    """Format settings in wrapped columns; `required` if there is no default."""
    rows = [
        (each.name, each.default or "required", "; ".join(filter(None, [each.kind, each.help]))) for each in settings
    ]
    rows = [row if len(row[1]) <= WIDEST else (row[0], "", f"{row[2]}; default {row[1]}") for row in rows]
    head = ("setting", "default", "what it is")
    first, second = (max(len(row[column]) for row in (head, *rows)) + 2 for column in (0, 1))
    lines = []
    for name, default, about in (head, *rows):
        wrapped = textwrap.wrap(about, max(width - first - second, 30)) or [""]
        lines.append(f"{name:<{first}}{default:<{second}}{wrapped[0]}".rstrip())
        lines += [" " * (first + second) + line for line in wrapped[1:]]
    return "\n".join(lines)


def help_texts(factory: Callable[..., Any]) -> dict[str, str]:
    """Return the comments beside settings by name. A function that returns a plug-in has the help of its class."""
    factory = factory.func if isinstance(factory, functools.partial) else factory
    if inspect.isclass(factory):
        found = [_comments(each) for each in reversed(factory.__mro__) if each.__module__ != "builtins"]
        return {name: text for each in found for name, text in each.items()}
    made = typing.get_type_hints(factory).get("return") if inspect.isfunction(factory) else None
    return {**(help_texts(made) if inspect.isclass(made) else {}), **_comments(factory)}


@functools.cache
def _comments(thing: Any) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(thing))
        (node,) = ast.parse(source).body
        comments = dict(_comment_lines(source))
    except (OSError, TypeError, SyntaxError, ValueError, tokenize.TokenError):  # typed into a console, or generated
        return {}
    return {name: comments[line] for name, line in _lines(node) if line in comments}


def _lines(node: ast.stmt) -> Iterator[tuple[str, int]]:
    """Yield the last line of each field of a class, or argument of a function."""
    if isinstance(node, ast.ClassDef):
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                yield field.target.id, field.end_lineno or field.lineno
    elif isinstance(node, ast.FunctionDef):
        arguments = [*node.args.args, *node.args.kwonlyargs]
        yield from ((each.arg, each.lineno) for each in arguments)


def _comment_lines(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments after code by line, without `type:` and `noqa`."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip():
            parts = [part.strip() for part in token.string.split("# ")]
            text = " ".join(part for part in parts if part and not part.lstrip("# ").startswith(("type:", "noqa")))
            if text:
                yield token.start[0], text.lstrip("# ")


def _defaults(factory: Callable[..., Any]) -> dict[str, str]:
    """Return the defaults as text; a plug-in as its spec."""
    inner = factory.func if isinstance(factory, functools.partial) else factory
    made = {
        each.name: each.default_factory()
        for each in (dataclasses.fields(inner) if dataclasses.is_dataclass(inner) else ())
        if each.default_factory is not dataclasses.MISSING
    }
    plain = {name: each.default for name, each in inspect.signature(inner).parameters.items()}
    known = {name: made.get(name, value) for name, value in plain.items()}
    return {name: value_text(canonical(value)) for name, value in known.items() if value is not inspect.Parameter.empty}


def value_text(value: Any) -> str:
    """Format a value as in YAML: `8/255`, `true`, `null`, `[1, 2]`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {value_text(each)}' for key, each in value.items())}}}"
    text = written(value)
    return f"{value:.6g}" if isinstance(value, float) and ("/" not in text or value > 1) else text


def _kind(part: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Describe the type of a JSON schema in words."""
    if "$ref" in part and REGISTRY not in part:
        part = schema.get("$defs", {}).get(part["$ref"].rpartition("/")[2], {})
    if REGISTRY in part:
        return f"{part[REGISTRY]}: a name, or {{name: …, setting: value}}"
    if "enum" in part or "const" in part:
        return " | ".join(map(value_text, part.get("enum", [part.get("const")])))
    if options := part.get("anyOf") or part.get("oneOf"):
        kinds = [_kind(each, schema) for each in options if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(filter(None, kinds)))
    match part.get("type"):
        case "integer" | "number" as number:
            return ("whole number" if number == "integer" else "number") + _bounds(part)
        case "boolean":
            return "true | false"
        case "string":
            return "text"
        case "array":
            inner: Mapping[str, Any] = part.get("items") or next(iter(part.get("prefixItems", ())), {})
            return f"list of {_kind(inner, schema)}" if inner else "list"
        case "object" if "properties" in part:
            return f"{{{', '.join(f'{name}: {_kind(each, schema)}' for name, each in part['properties'].items())}}}"
        case "object":
            return "keys and values"
    return ""


def _bounds(part: Mapping[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {part[key]:g}" for key, sign in signs.items() if key in part]
    return f" {', '.join(bounds)}" if bounds else ""

"""Settings of attacks, objectives, probes, models, data sets and recipes, checked by pydantic in Python and in YAML.

    @settings
    class PGD:
        steps: Annotated[int, Ge(0)] = 20

    PGD(steps="20")     # BastionError: pgd.steps: expected a whole number, got '20'

Numbers are checked strictly: text (except a fraction such as "8/255"), booleans, NaN and infinity are errors.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import (
    Annotated,
    Any,
    ClassVar,
    Required,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    overload,
)

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic.errors import PydanticInvalidForJsonSchema
from typing_extensions import TypedDict

from bastion.errors import BastionError, did_you_mean, shown

T = TypeVar("T")
_DECIMAL = r"(?:\d+(?:\.\d+)?|\.\d+)"
_FRACTION = re.compile(rf"\s*([-+]?{_DECIMAL})\s*/\s*({_DECIMAL})\s*")
CONFIG = ConfigDict(extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)

# Common types of settings.
Count = Annotated[int, Ge(0)]
AtLeastOne = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Gt(0), Le(1)]  # a share above 0
Probability = Annotated[float, Ge(0), Le(1)]
Smoothing = Annotated[float, Ge(0), Lt(1)]


built_from_specs: dict[type, Any] = {}  # by type of plug-in, the annotation that validates a setting of it
PLUGIN = "__plugin__"  # attribute of a class with its registered name
REGISTRY = "x-registry"  # in a JSON schema: a spec of a plug-in of this kind


class SettingsError(BastionError, ValueError):
    """A wrong setting: its path and the reason. Also a ValueError, so that pydantic adds the path."""

    def __init__(self, where: str, keys: Iterable[str | int], message: str) -> None:
        self.where, self.keys, self.message = where, tuple(map(str, keys)), message
        path = ".".join(filter(None, [where, *self.keys]))
        super().__init__(f"{path}: {message}" if path else message)

    def under(self, where: str) -> SettingsError:
        """Return the same error under another path."""
        return SettingsError(where, self.keys, self.message)

    def __reduce__(self) -> tuple[type[SettingsError], tuple[str, tuple[str, ...], str]]:
        """Support pickling, to send it between processes."""
        return SettingsError, (self.where, self.keys, self.message)


@overload
def settings(cls: type[T], /) -> type[T]: ...


@overload
def settings(*, kw_only: bool = True, frozen: bool = True, eq: bool = True) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field, Field))
def settings(cls: type[T] | None = None, /, **options: bool) -> Any:
    """Make a class a frozen dataclass with keyword-only, validated fields."""
    if cls is None:
        return lambda cls: _checked(cls, **options)
    return _checked(cls, **options)


def _checked(cls: type[T], *, kw_only: bool = True, frozen: bool = True, eq: bool = True) -> type[T]:
    make_strict(cls)
    made: Any = dataclass(config=CONFIG, kw_only=kw_only, frozen=frozen, eq=eq)(cls)
    plain = made.__init__
    names = [] if kw_only else list(inspect.signature(made).parameters)  # so that errors name the field

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        named = dict(zip(names, args, strict=False))
        try:
            plain(self, *args[len(named) :], **named, **kwargs)
        except ValidationError as error:
            where = getattr(cls, PLUGIN, cls.__name__.lower())
            raise explain(error, where, TypeAdapter(made).json_schema) from error

    made.__init__ = init
    checked: type[T] = made
    return checked


def make_strict(cls: type) -> None:
    """Make the types of a class's own fields strict, before pydantic reads them."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for name in inspect.get_annotations(cls):
        if get_origin(hints[name]) is not ClassVar and hints[name] is not ClassVar:
            cls.__annotations__[name] = strict(hints[name])


def strict(hint: Any) -> Any:
    """Return the type with strict numbers and booleans, and with specs built to plug-ins, at any depth."""
    if isinstance(hint, type) and hint in built_from_specs:
        return built_from_specs[hint]
    if hint is int:
        return Annotated[int, BeforeValidator(_whole)]
    if hint is float:
        return Annotated[float, BeforeValidator(_number)]
    if hint is bool:
        return Annotated[bool, BeforeValidator(_boolean)]
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kind = strict(inner[0])
        # The bounds first, so that they apply to the number and appear in the schema.
        checks = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
        return Annotated[(inner[0] if checks else kind, *inner[1:], *checks)]
    if origin in (Union, types.UnionType):
        return Union[tuple(map(strict, inner))]  # noqa: UP007
    if origin in (list, dict):
        return origin[tuple(map(strict, inner))]
    if origin is tuple:
        return tuple[tuple(each if each is ... else strict(each) for each in inner)]  # type: ignore[misc]
    return hint


def _whole(value: Any) -> int:
    exact = isinstance(value, float) and value.is_integer()  # YAML's 5e3
    if isinstance(value, bool) or not (exact or isinstance(value, int | np.integer)):
        raise ValueError("expected a whole number")
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, str) and (fraction := _FRACTION.fullmatch(value)) and float(fraction[2]):
        return float(fraction[1]) / float(fraction[2])
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ValueError("expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("expected a finite number")
    return number


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def check_arguments(
    factory: Callable[..., Any],
    values: Mapping[str, Any],
    where: str,
    given: Iterable[str] = (),
    others: Iterable[str] = (),
) -> dict[str, Any]:
    """Validate keyword arguments of a function or class by its annotations; nested plug-ins are built.

    `given` are arguments that `values` may not have; `others` are valid keys of something else, for suggestions.
    """
    form = _form(_unbound(factory), frozenset(given))
    try:
        checked: dict[str, Any] = form.validate_python(dict(values))
        return checked
    except ValidationError as error:
        raise explain(error, where, form.json_schema, others) from error


def arguments_schema(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of the keyword arguments."""
    return _form(_unbound(factory), frozenset()).json_schema()


def _unbound(factory: Callable[..., Any]) -> Callable[..., Any]:
    return factory.func if isinstance(factory, functools.partial) else factory


@functools.cache
def _form(factory: Callable[..., Any], given: frozenset[str]) -> TypeAdapter[Any]:
    """Return the validator of the arguments."""
    hints = typing.get_type_hints(_annotated(factory), include_extras=True)
    fields: dict[str, Any] = {}
    config = CONFIG
    for name, each in inspect.signature(factory).parameters.items():
        if each.kind is each.VAR_KEYWORD:
            config = CONFIG | {"extra": "allow"}
        elif each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) and name not in given:
            hint = strict(hints.get(name, Any))
            if each.default is each.empty:
                fields[name] = Required[hint]
            else:
                fields[name] = Annotated[hint, Field(json_schema_extra=_default(each.default))]
    form = TypedDict("Arguments", fields, total=False)  # type: ignore[misc]
    cast(Any, form).__pydantic_config__ = config
    return TypeAdapter(form)


def _annotated(factory: Callable[..., Any]) -> Any:
    if not inspect.isclass(factory):
        return factory
    return factory if hasattr(factory, "__dataclass_fields__") else factory.__init__


def _default(value: Any) -> dict[str, Any]:
    plain = isinstance(value, str | int | float | bool | list | None) or value == ()
    return {"default": list(value) if value == () else value} if plain else {}


def explain(
    error: ValidationError, where: str, schema: Callable[[], Mapping[str, Any]], others: Iterable[str] = ()
) -> SettingsError:
    """Return the first error; unknown keys come first, as a missing key may be due to a typo."""
    unknown = ("extra_forbidden", "unexpected_keyword_argument")
    everything = error.errors()
    # Of a section that may also be a word, what is wrong in the section.
    mistakes = [each for each in everything if not _is_section_for_word(each)] or everything
    first = next((each for each in mistakes if each["type"] in unknown), mistakes[0])
    try:
        known = schema()
    except PydanticInvalidForJsonSchema:  # a setting whose type JSON lacks
        known = {}
    classes = known.get("$defs", {})
    keys = [str(part) for part in first["loc"] if part not in classes and not _is_inner(part)]
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, SettingsError):
        return SettingsError(where, [*keys, *inner.keys], inner.message)
    if first["type"] in unknown:
        names = {*_keys_at(known, keys[:-1]), *(others if len(keys) == 1 else ())}
        below = [f"{name}.{keys[-1]}" for name in names if keys[-1] in _keys_at(known, [*keys[:-1], name])]
        near = f"; did you mean '{below[0]}'?" if len(below) == 1 else did_you_mean(keys[-1], names)
        if not below and keys[-1] in ("eps", "norm"):
            near = f"; {keys[-1]} belongs to the threat: {{norm: linf, eps: 8/255}}, or bastion.attack(…, {keys[-1]}=…)"
        message = f"unknown key{near}"
    elif first["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        message = "missing; it has no default"
    elif first["type"] == "unexpected_positional_argument":
        keys, message = (
            [],
            "settings are given by name, such as steps=20; a model goes to bastion.attack(model, x, y, …)",
        )
    elif first["type"] == "literal_error":
        expected = [each["ctx"]["expected"] for each in mistakes if each["type"] == "literal_error"]  # all of a union
        words = {word.strip(" '") for text in expected for word in text.replace(" or ", ",").split(",")}
        message = f"unknown {keys[-1]} {shown(first['input'])}{did_you_mean(first['input'], words)}"
    else:
        message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        message = message[:1].lower() + message[1:] + (f", got {shown(first['input'])}" if keys else "")
    return SettingsError(where, keys, message)


def _is_section_for_word(mistake: Mapping[str, Any]) -> bool:
    return mistake["type"] == "literal_error" and isinstance(mistake["input"], Mapping)


def _keys_at(schema: Mapping[str, Any], path: Iterable[str]) -> set[str]:
    """Return the keys of a JSON schema at the end of a path."""

    def options(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if "$ref" in part:
            part = schema.get("$defs", {}).get(part["$ref"].rpartition("/")[2], {})
        yield part
        for inner in (*part.get("anyOf", ()), *part.get("oneOf", ()), *part.get("allOf", ())):
            yield from options(inner)

    found = list(options(schema))
    for key in path:
        below = [
            part["items"] if key.isdigit() and "items" in part else part.get("properties", {}).get(key)
            for part in found
        ]
        found = [option for part in below if part for option in options(part)]
    return {key for part in found for key in part.get("properties", {})}


def _is_inner(part: str | int) -> bool:
    """Whether a part of pydantic's path is a step into a type (a union's member, a validator), not a key."""
    return isinstance(part, str) and (part.startswith(("function-", "literal[", "tuple[")) or part in _TYPES)


_TYPES = {"int", "float", "bool", "str", "none", "nullable"}

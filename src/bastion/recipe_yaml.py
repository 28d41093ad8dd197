"""YAML of recipes and suites: `8/255` and `1e-3` are numbers, a duplicate key is an error."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from bastion.errors import BastionError

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"  # only one way to match any text: linear time
_FRACTION = rf"{_NUMBER}\s*/\s*{_NUMBER}"
# Limits: ten times the largest shipped file, which is still read in a few seconds.
LARGEST = 10_000  # values of a file, after expanding aliases
LONGEST = 1_000_000  # characters
DEEPEST = 50  # nested lists and sections
GREATEST = 2**63  # of whole numbers


def dump(content: Mapping[str, Any], *, fractions: bool = False) -> str:
    """Dump to YAML; `fractions` writes 8/255 as such and short lists in a line, for people."""
    dumper, flow = (_FractionDumper, None) if fractions else (yaml.SafeDumper, False)
    return str(
        yaml.dump(dict(content), None, dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=flow)
    )


class _FractionDumper(yaml.SafeDumper):
    pass


def _written(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    levels = round(255 * value, 2)
    if 0 < value < 1 and value != round(value, 3) and levels / 255 == value:
        return dumper.represent_scalar("tag:yaml.org,2002:str", f"{levels:g}/255")
    return dumper.represent_float(value)


_FractionDumper.add_representer(float, _written)


def read(content: str, where: str) -> dict[str, Any]:
    """Parse a file with keys and values."""
    parsed = _parse(content, where)
    if not isinstance(parsed, dict):
        raise BastionError(f"{where}: expected keys and values, got {type(parsed).__name__}")
    return parsed


def read_value(text: str, where: str) -> Any:
    """Parse one value, as after a key."""
    if "\n" in text or "\r" in text:
        raise BastionError(f"{where}: a value must be on one line; write lists as [a, b] and sections as {{a: 1}}")
    return read(f"value: {text}", where)["value"]


def read_spec(text: str) -> dict[str, Any]:
    """Parse a plug-in with its settings: `pgd`, or `pgd:steps=20,loss=margin`."""
    name, _, rest = text.partition(":")
    spec: dict[str, Any] = {"name": name}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals or key in spec:
            raise BastionError(f"'{text}': expected NAME:key=value,key=value, got '{pair}'")
        spec[key] = read_value(value, f"'{text}'")
    return spec


def read_fractions(value: Any) -> Any:
    """Convert fractions such as `"8/255"` in Python values to numbers, as in a file."""
    if isinstance(value, str):
        return float(_quotient(value)) if re.fullmatch(_FRACTION, value) else value
    if isinstance(value, Mapping):
        return {key: read_fractions(each) for key, each in value.items()}
    return [read_fractions(each) for each in value] if isinstance(value, list | tuple) else value


def _quotient(text: str) -> float:
    over, _, under = text.partition("/")
    if float(under) == 0:
        raise BastionError(f"{text} divides by zero")
    return float(over) / float(under)


def _parse(content: str, where: str) -> Any:
    if len(content) > LONGEST:
        raise BastionError(f"{where}: has {len(content):,} characters; a file of settings may have {LONGEST:,}")
    try:
        parsed = yaml.load(content, _Loader)
        _count(parsed, ())
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise BastionError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error
    return parsed


def _count(value: Any, inside: tuple[int, ...], seen: int = 0) -> int:
    """Count the values with aliases expanded, which can make a short file huge or infinite; raise at the limit."""
    if seen > LARGEST:
        raise ValueError(f"more than {LARGEST:,} values; does an alias repeat what has aliases?")
    if not isinstance(value, dict | list):
        return seen + 1
    if id(value) in inside:
        raise ValueError("an alias is inside what it repeats")
    if len(inside) > DEEPEST:
        raise ValueError(f"lists or sections more than {DEEPEST} deep in each other")
    for each in value.values() if isinstance(value, dict) else value:
        seen = _count(each, (*inside, id(value)), seen)
    return seen + 1


class _Loader(yaml.SafeLoader):
    """Unlike in YAML 1.1, `on`, `no`, `1:30`, `0x1f` and `2020-01-01` are text, and `1e-3` is a number."""

    nodes = 0  # seen so far

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Stop as soon as there are too many values."""
        self.nodes += 1
        if self.nodes > 2 * LARGEST:  # keys are nodes, too
            raise ComposerError(None, None, f"more than {LARGEST:,} values", None)
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            kind = str(node.tag).rpartition(":")[2]
            text = str(node.value)[:40] if isinstance(node, yaml.ScalarNode) else "this"
            raise ConstructorError(None, None, f"'{text}' is not a valid {kind}", node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool | None):
                raise ConstructorError(None, None, "a key must be a word or a number", key_node.start_mark)
            if key in seen:
                raise ConstructorError(None, None, f"the key '{key}' is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _whole(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    number = int(node.value)  # 010 is ten, not eight
    if abs(number) >= GREATEST:
        raise ValueError("it does not fit into 64 bits")
    return number


def _fraction(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    try:
        return _quotient(node.value)
    except BastionError as error:
        raise ConstructorError(None, None, str(error), node.start_mark) from error


_STANDARD = "tag:yaml.org,2002:"
_KEPT = ("null", "bool", "float", "str", "seq", "map")  # no dates, sets, bytes: what JSON has, and fractions
_Loader.yaml_constructors = {None: yaml.SafeLoader.yaml_constructors[None]} | {
    f"{_STANDARD}{kind}": yaml.SafeLoader.yaml_constructors[f"{_STANDARD}{kind}"] for kind in _KEPT
}
_Loader.add_constructor(f"{_STANDARD}int", _whole)
_Loader.add_constructor("!fraction", _fraction)

_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in [
    (f"{_STANDARD}null", r"~|null|", ["~", "n", ""]),
    (f"{_STANDARD}bool", r"[tT]rue|[fF]alse", list("tTfF")),
    (f"{_STANDARD}int", r"[-+]?\d+", list("-+0123456789")),
    (f"{_STANDARD}float", rf"{_NUMBER}|[-+]?\.(?:inf|nan)", list("-+.0123456789")),
    ("!fraction", _FRACTION, list("-+.0123456789")),
]:
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)

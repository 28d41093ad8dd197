"""Recipes of a paper: one YAML file with the words that names consist of, and tables that combine them.

    cite: Tang et al. 2022
    common: {data: cifar10, batch: 128}                # shared by all runs
    axes:                                              # words by axis, and their part of a recipe
      model:
        vit: {about: ViT, model: {name: cifar/vit, patch_size: 4}}
        resnet: {about: ResNet-50, model: cifar/resnet}
      objective:
        default: {objective: adversarial}              # the word that names leave out
        standard: {objective: standard}
    tables:
      Table 1:                                         # vit, vit-standard, resnet, resnet-standard
        axes: {model: [vit, resnet], objective: [default, standard]}
      Fig. 3:                                          # resnet-l1-1e-5, resnet-l1-1e-4
        axes: {model: resnet, study: l1, strength: ['1e-5', '1e-4']}
        common: {optimizer: {l1: $strength}}           # words without an entry stand for themselves

A row is `common` of the file, `common` of its table, then its words in the order of the name, then those entries of
the table's `rows` whose pattern its name matches, each over those before it. `without` lists patterns of combinations
that a table does not have. Text may name an axis, or a value that a word gives `with` it, as `$axis`.

`about` of each part goes into the row's; `first` says what must be done before it can run. Beside the file, a table of
the same name (.csv) has the published numbers, by row.
"""

from __future__ import annotations

import csv
import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from string import Template
from typing import Any

from bastion.errors import BastionError
from bastion.recipe_yaml import read, read_value

UNNAMED = "default"
Part = Mapping[str, Any]  # of a recipe
OF_PAPERS = ("about", "first", "with")  # keys of a part that recipes do not have


@dataclass(frozen=True)
class Row:
    """One recipe of a paper."""

    paper: Paper
    name: str
    words: Mapping[str, Any]  # values of `$word`
    parts: tuple[Part, ...]  # each overrides those before it

    @property
    def about(self) -> str:
        """Describe it in a line: its words first, then what it shares with others."""
        common, own = self.parts[:2], self.parts[2:]
        return ", ".join(self._texts("about", (*own, *reversed(common)))) + "."

    @property
    def first(self) -> list[str]:
        return list(self._texts("first", self.parts))

    @property
    def contents(self) -> Iterator[dict[str, Any]]:
        """The parts in the format of recipes."""
        for part in self.parts:
            yield {key: self._fill(value) for key, value in part.items() if key not in OF_PAPERS}

    def _texts(self, key: str, parts: tuple[Part, ...]) -> Iterator[str]:
        return (str(self._fill(part[key])) for part in parts if part.get(key))

    def _fill(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self._fill(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._fill(each) for each in value]
        if not isinstance(value, str) or "$" not in value:
            return value
        try:
            text = Template(value).substitute(self.words)
        except (KeyError, ValueError) as error:
            raise BastionError(f"{self.paper.path}: {self.name}: no axis or value for {error} in '{value}'") from error
        return read_value(text, self.name) if value[1:] in self.words else text  # `$strength` alone may be a number


class Paper:
    """The recipes of one file, by their names without that of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = read(path.read_text(), str(path))
        self.cite: str = content["cite"]
        self.weights: dict[str, str] = content.get("weights", {})  # their owner, if not timm
        self.common: Part = content["common"]
        self.axes: dict[str, dict[Any, Part]] = content["axes"]
        self.rows: dict[str, Row] = {}
        for title, table in content["tables"].items():
            for row in self._rows_of(table):
                if row.name in self.rows:
                    raise BastionError(f"{path}: {title}: '{row.name}' is in another table already")
                self.rows[row.name] = row

    def _rows_of(self, table: Mapping[str, Any]) -> Iterator[Row]:
        axes = {axis: self._words(axis, chosen) for axis, chosen in table["axes"].items()}
        special = {tuple(pattern.split()): part for pattern, part in table.get("rows", {}).items()}
        for combination in itertools.product(*axes.values()):
            words = dict(zip(axes, combination, strict=True))
            name = "-".join(word for word in combination if word != UNNAMED)
            if _matches(name, table.get("without", [])):
                continue
            named = [axes[axis][word] for axis, word in words.items()]
            named += [part for patterns, part in special.items() if _matches(name, patterns)]
            parts = (self.common, table.get("common", {}), *named)
            values = {key: value for part in parts for key, value in part.get("with", {}).items()}
            yield Row(self, name, words | values, parts)

    def _words(self, axis: str, chosen: Any) -> Mapping[str, Part]:
        """Return the words of an axis that a table uses; it may also define them itself."""
        if isinstance(chosen, Mapping):
            return {str(word): part for word, part in chosen.items()}
        known = self.axes.get(axis)
        try:
            return {str(word): known[word] if known else {} for word in _listed(chosen)}
        except KeyError as error:
            raise BastionError(f"{self.path}: axes.{axis}: has no word {error}") from error

    def expected(self, name: str) -> dict[str, Any] | None:
        """Return the published numbers of a row, and their source."""
        found = self._published.get(name)
        if found is None:
            return None
        numbers = {key: read_value(cell, name) for key, cell in found.items() if cell and key not in ("source", "note")}
        note = {"note": found["note"]} if found.get("note") else {}
        return {**numbers, "source": f"{found['source']} of {self.cite}", **note}

    @functools.cached_property
    def _published(self) -> dict[str, dict[str, str]]:
        with self.path.with_suffix(".csv").open(newline="") as file:
            return {row.pop("name"): row for row in csv.DictReader(file)}


@functools.cache
def read_paper(path: Path) -> Paper:
    return Paper(path)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _matches(name: str, patterns: Any) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)

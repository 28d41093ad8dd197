"""Suites: what is measured, as YAML. Probes and studies by label, the values they take, and how they are summed up.

    axes:
      eps: {set: [probes.pgd.threat.eps], to: [2/255, 4/255, 8/255]}   # three variants of the probe `pgd`
    probes:
      clean: accuracy
      pgd: {name: adversarial, threat: {norm: linf}, attack: pgd}
    aggregates:
      worst case: {worst: [clean, pgd]}                                # right under all of them

`role` and `data` beside a probe's own settings say what its facts are, and change the data set for this probe alone:
`fog: {name: accuracy, role: corruption, data: {corruption: fog, severity: 3}}`. Settings that move together are one
axis, each with its factor: `size: {set: {data.size: 1, probes.pgd.threat.eps: 1/112}, to: [192, 224]}`. No torch.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import MinLen
from pydantic import BeforeValidator, Field, model_validator

from bastion.errors import printable
from bastion.recipe import Section, Spec, load_yaml, plugin
from bastion.recipe_files import Changes, merge, nested, parse_changes

Kind = Literal["probes", "studies"]
Role = Literal["clean", "attack", "corruption", "check", "analysis"]  # what the facts of a probe say of a model
CORRECT = "correct"  # the column of facts that accuracies are made of
SHARE_RIGHT = "share_right"  # of a probe that asks several times: the share of right answers, whose mean is one too
SHARES = (CORRECT, SHARE_RIGHT, "flip_rate", "confidence")  # columns of numbers between 0 and 1
AGGREGATES = ("worst", "mean", "errors", "sum")
WEIGHTED = ("errors", "sum")
MOST_CASES = 2_000  # of a suite: 20 times what the largest shipped one has
LABELLED = ("probes", "studies", "aggregates", "curves")  # what has labels, and may be left out by them


def _listed(value: Any) -> Any:
    """One or several."""
    return value if isinstance(value, list | tuple) else [value]


def _one_or_several(kind: Any) -> BeforeValidator:
    return BeforeValidator(_listed, json_schema_input_type=kind | list[kind] if kind is not Any else Any)


def _with_factors(value: Any) -> Any:
    """One path, several, or each with the factor that values are multiplied by."""
    if isinstance(value, Mapping):
        return value
    if not all(isinstance(path, str) for path in _listed(value)):
        raise ValueError("expected paths of settings, such as probes.pgd.threat.eps")
    return dict.fromkeys(_listed(value), 1)


class Axis(Section):
    """A setting that takes several values: each of them, with each of the other axes' values, makes a variant."""

    set: Annotated[
        dict[str, float],
        MinLen(1),
        BeforeValidator(_with_factors, json_schema_input_type=str | list[str] | dict[str, float]),
    ]  # data.KEY, probes.LABEL.KEY, probes.LABEL.data.KEY or studies.LABEL.KEY; several with factors: {PATH: FACTOR}
    to: Annotated[tuple[Any, ...], MinLen(1), _one_or_several(Any)]  # the values, one or a list

    @model_validator(mode="after")
    def _paths(self) -> Axis:
        for path in self.set:
            first, *rest = path.split(".")
            if first not in ("data", *get_args(Kind)) or not all(rest) or len(rest) < (1 if first == "data" else 2):
                raise ValueError(f"set: expected data.KEY, probes.LABEL.KEY or studies.LABEL.KEY, got '{path}'")
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.to)
        if not numbers and any(factor != 1 for factor in self.set.values()):
            raise ValueError(f"set: factors are for numbers, got {', '.join(map(str, self.to))}")
        return self

    def reaches(self, kind: Kind, label: str) -> list[str]:
        """Those of its paths that change what this probe or study does."""
        return [path for path in self.set if path.startswith(("data.", f"{kind}.{label}."))]

    def scaled(self, path: str, value: Any) -> Any:
        return value if self.set[path] == 1 else value * self.set[path]


class Aggregate(Section):
    """One number made of several probes, example by example. A probe's label stands for all its variants."""

    worst: tuple[str, ...] = ()  # right under every one of these
    mean: tuple[str, ...] = ()  # the mean of these accuracies
    errors: dict[str, float] = Field(default_factory=dict)  # a weighted sum of error rates, as mCE is
    sum: dict[str, float] = Field(default_factory=dict)  # a weighted sum of a column, as mFR is of flip rates
    column: str = CORRECT  # that `mean` and `sum` are of

    @model_validator(mode="after")
    def _one(self) -> Aggregate:
        if sum(bool(getattr(self, kind)) for kind in AGGREGATES) != 1:
            raise ValueError(f"expected one of {', '.join(AGGREGATES)}")
        if self.column != CORRECT and self.kind in ("worst", "errors"):
            raise ValueError(f"column: {self.kind} is of '{CORRECT}' alone")
        return self

    @property
    def kind(self) -> str:
        return next(kind for kind in AGGREGATES if getattr(self, kind))

    @property
    def weights(self) -> dict[str, float]:
        """By the names of probes, as written."""
        chosen = getattr(self, self.kind)
        return dict(chosen) if isinstance(chosen, dict) else dict.fromkeys(chosen, 1.0)


@dataclass(frozen=True)
class Case:
    """A probe or a study with all its settings, on one variant of the data."""

    label: str
    base: str  # the label in the suite, without the values of the axes
    kind: Kind
    spec: Any  # or the probe or study itself
    role: Role | None = None  # None: the probe's own
    data: dict[str, Any] = field(default_factory=dict)  # changes to the data set's settings
    at: dict[str, Any] = field(default_factory=dict)  # the axes' values


class Suite(Section):
    about: str = ""  # its first line is what `bastion list suites` says
    paper: str = ""  # whose protocol it is: recipes of this paper have published numbers by the suite's labels
    adapt_size: bool = False  # fit the model to variants of another size: position embeddings are interpolated
    axes: dict[str, Axis] = Field(default_factory=dict)  # settings that take several values, by a name for `--set`
    data: dict[str, Any] = Field(default_factory=dict)  # changes to the settings of the data set that is measured on
    probes: dict[str, Annotated[Spec, plugin("probe")]] = Field(default_factory=dict)  # by label, image by image
    studies: dict[str, Annotated[Spec, plugin("study")]] = Field(default_factory=dict)  # by label, of the whole model
    aggregates: dict[str, Aggregate] = Field(default_factory=dict)  # by label: one number of several probes
    curves: dict[str, tuple[float, ...]] = Field(default_factory=dict)  # of probes with distances: accuracy at radii

    @model_validator(mode="after")
    def _labels(self) -> Suite:
        labels = Counter([*self.probes, *self.studies, *self.aggregates])
        if not (self.probes or self.studies):
            raise ValueError("probes: a suite needs at least one probe or study")
        for label in labels:
            if not label.strip() or "/" in label or printable(label) != label or labels[label] > 1:
                raise ValueError(f"'{label}': a label names one row of a table and has no '/'; choose another one")
        for name, axis in self.axes.items():
            if name in Suite.model_fields or not any(axis.reaches(kind, label) for kind, label in self._members()):
                raise ValueError(f"axes.{name}: no probe or study has what it sets: {', '.join(axis.set)}")
        return self

    @model_validator(mode="after")
    def _known(self) -> Suite:
        count = sum(math.prod(len(self.axes[name].to) for name in self._reaching(*each)) for each in self._members())
        if count > MOST_CASES:
            raise ValueError(f"axes: {count:.6g} variants of probes and studies; {MOST_CASES:,} are the most")
        labels = Counter([*(case.label for case in self.cases()), *self.aggregates])
        for label in labels:
            if labels[label] > 1:
                raise ValueError(f"'{label}': two rows would have this label; choose other labels or values")
        for name in self.aggregates:
            self.members(name)
        for label in self.curves:
            if label not in self.probes:
                raise ValueError(f"curves.{label}: no probe '{label}' in this suite")
        return self

    def cases(self) -> list[Case]:
        """Every probe and study on every variant, in the order of the suite."""
        return [case for kind, label in self._members() for case in self._variants(kind, label)]

    def members(self, aggregate: str) -> dict[str, float]:
        """The labels of the cases that an aggregate is made of, with their weights. Each case counts once."""
        names, weighted = self.aggregates[aggregate].weights, self.aggregates[aggregate].kind in WEIGHTED
        probes = [case for case in self.cases() if case.kind == "probes"]
        named_by: dict[str, str] = {}
        for name in names:
            pattern = _pattern(name)
            named = [case.label for case in probes if name == case.base or pattern.fullmatch(case.label)]
            if not named:
                raise ValueError(f"aggregates.{aggregate}: no probe '{name}' in this suite")
            if weighted and (twice := [label for label in named if label in named_by]):
                raise ValueError(
                    f"aggregates.{aggregate}: '{named_by[twice[0]]}' and '{name}' both name '{twice[0]}', which has "
                    "one weight; leave it to one of them"
                )
            named_by |= dict.fromkeys(named, name)
        return {label: names[name] for label, name in named_by.items()}

    def resolved(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_defaults=True)

    def _members(self) -> Iterator[tuple[Kind, str]]:
        yield from (("probes", label) for label in self.probes)
        yield from (("studies", label) for label in self.studies)

    def _reaching(self, kind: Kind, label: str) -> dict[str, list[str]]:
        """The axes that change what a probe or study does, and their paths that do."""
        return {name: paths for name, axis in self.axes.items() if (paths := axis.reaches(kind, label))}

    def _variants(self, kind: Kind, label: str) -> Iterator[Case]:
        axes = self._reaching(kind, label)
        plain = {"data": self.data, kind: {label: getattr(self, kind)[label].plain()}}
        for values in itertools.product(*(self.axes[name].to for name in axes)):
            content = plain
            for (name, paths), chosen in zip(axes.items(), values, strict=True):
                for path in paths:
                    value = self.axes[name].scaled(path, chosen)
                    own = path.removeprefix(f"{kind}.{label}.")  # a label may have dots in it
                    change: dict[str, Any] = nested(path, value)
                    if own != path:
                        change = {kind: {label: nested(own, value)}}
                    content = merge(content, change)
            at = dict(zip(axes, values, strict=True))
            said = [f"{name}={written(value)}" for name, value in at.items() if len(self.axes[name].to) > 1]
            spec, role, own_data = content[kind][label], None, {}
            if isinstance(spec, Mapping):  # not a plug-in that was given as an object
                spec = dict(spec)
                role, own_data = spec.pop("role", None), spec.pop("data", {})
            if role not in (None, *get_args(Role)):
                raise ValueError(f"{kind}.{label}.role: expected one of {', '.join(get_args(Role))}, got {role!r}")
            if not isinstance(own_data, Mapping):
                raise ValueError(
                    f"{kind}.{label}.data: expected changes to the data set as {{key: value}}, got {own_data!r}"
                )
            yield Case(" ".join([label, *said]), label, kind, spec, role, merge(content["data"], own_data), at)


def _pattern(name: str) -> re.Pattern[str]:
    """In which `*` stands for anything, and nothing else is special."""
    return re.compile(fnmatch.translate(re.sub(r"[\[?]", r"[\g<0>]", name)))


def written(value: Any) -> str:
    """As people write it: `8/255`, unless it is a short decimal."""
    if not isinstance(value, float):
        return str(value)
    levels = round(255 * value, 2)
    if value != round(value, 3) and abs(255 * value - levels) < 1e-6:
        return f"{levels:g}/255"
    return f"{value:.4g}"


def load_suite(name: str | Path | Mapping[str, Any], changes: Changes = ()) -> Suite:
    """A suite by its shipped name (`demo`) or file, or what such a file would say.

    A change such as `eps=4/255` whose key is the name of an axis sets the values of the axis, `probes.LABEL=null`
    leaves a probe out, and so for aggregates. Any other change makes it another protocol than the paper's.
    """
    wanted = parse_changes(changes, Suite)

    def on_top(content: Mapping[str, Any]) -> dict[str, Any]:
        axes = content.get("axes") or {}
        to_axes = {key: {"to": value} for key, value in wanted.items() if key in axes}
        rest = {key: value for key, value in wanted.items() if key not in axes}
        changed = merge(content, merge(rest, {"axes": to_axes} if to_axes else {}), Suite)
        changed |= {part: _without_null(changed[part]) for part in LABELLED if part in changed}
        return changed if not rest or _only_leaves_out(rest) else {**changed, "paper": ""}

    return load_yaml(Suite, "suite", name, on_top)


def _without_null(members: Any) -> Any:
    if not isinstance(members, Mapping):
        return members
    return {label: member for label, member in members.items() if member is not None}


def _only_leaves_out(changes: Mapping[str, Any]) -> bool:
    """What is measured besides is still what the suite says."""
    return changes.keys() <= set(LABELLED) and not any(map(_without_null, changes.values()))

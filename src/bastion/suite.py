"""Suites: what is measured, as YAML: probes and studies by label, axes of their settings, and aggregates.

    axes:
      eps: {set: [probes.pgd.threat.eps], to: [2/255, 4/255, 8/255]}   # three variants of the probe `pgd`
    probes:
      clean: accuracy
      pgd: {name: adversarial, threat: {norm: linf}, attack: pgd}
    aggregates:
      worst case: {worst: [clean, pgd]}                                # right under all of them

`role` and `data` beside a probe's own settings say what its facts are, and change the data set for this probe only:
`fog: {name: accuracy, role: corruption, data: {corruption: fog, severity: 3}}`. Settings that move together are one
axis, each with its factor: `size: {set: {data.size: 1, probes.pgd.threat.eps: 1/112}, to: [192, 224]}`. No torch.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Gt, MinLen
from pydantic import BeforeValidator, Field, model_validator

from bastion.errors import OTHER_NAMES, BastionError, printable
from bastion.recipe import Section, Spec, load_yaml, plugin
from bastion.recipe_files import Changes, merge, nested, parse_changes

Kind = Literal["probes", "studies"]
Role = Literal["clean", "attack", "corruption", "check", "analysis"]  # what the facts of a probe are about
CORRECT = "correct"  # the bool column whose mean is an accuracy
# What a column of facts is, as its probe declares it. `accuracy`: a share of right predictions; `error rate`: a share
# of which less is better; `distance`: of an adversarial example from its image, without a column `correct` of the
# nearest one: infinite if none was found, 0 for clean mistakes; `phase`: survived, sampled or lost, in two phases.
FactKind = Literal["number", "accuracy", "error rate", "share", "distance", "phase"]
SHARES = ("accuracy", "error rate", "share")  # kinds of numbers between 0 and 1, shown in percent
AGGREGATES = ("worst", "mean", "errors", "sum")
WEIGHTED = ("errors", "sum")
MOST_CASES = 2_000  # of a suite, 20 times the largest shipped one
LABELLED = ("probes", "studies", "aggregates", "curves")  # sections whose entries may be left out by label


def _listed(value: Any) -> Any:
    """Accept one or several."""
    return value if isinstance(value, list | tuple) else [value]


def _one_or_several(kind: Any) -> BeforeValidator:
    return BeforeValidator(_listed, json_schema_input_type=kind | list[kind] if kind is not Any else Any)


def _with_factors(value: Any) -> Any:
    """Accept one path, several, or each with a factor that multiplies the values."""
    if isinstance(value, Mapping):
        return value
    if not all(isinstance(path, str) for path in _listed(value)):
        raise ValueError("expected paths of settings, such as probes.pgd.threat.eps")
    return dict.fromkeys(_listed(value), 1)


class Axis(Section):
    """A setting with several values; each combination of the axes' values makes a variant."""

    set: Annotated[
        dict[str, float],
        MinLen(1),
        BeforeValidator(_with_factors, json_schema_input_type=str | list[str] | dict[str, float]),
    ]  # data.KEY, probes.LABEL.KEY, probes.LABEL.data.KEY or studies.LABEL.KEY; several with factors: {PATH: FACTOR}
    to: Annotated[tuple[Any, ...], MinLen(1), _one_or_several(Any)]  # the values, one or a list
    image_size: Annotated[int, Gt(0)] | None = None  # side of the images that the values are for

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
        """Return the paths that change this probe or study."""
        return [path for path in self.set if path.startswith(("data.", f"{kind}.{label}."))]

    def scaled(self, path: str, value: Any) -> Any:
        return value if self.set[path] == 1 else value * self.set[path]


class Aggregate(Section):
    """One number from several probes, computed per example. A probe's label stands for all its variants."""

    worst: tuple[str, ...] = ()  # correct under all of these
    mean: tuple[str, ...] = ()  # the mean of these accuracies
    errors: dict[str, float] = Field(default_factory=dict)  # a weighted sum of error rates, as mCE is
    sum: dict[str, float] = Field(default_factory=dict)  # a weighted sum of a column, as mFR is of flip rates
    column: str = CORRECT  # that `mean` and `sum` are of
    only_for: tuple[str, ...] = ()  # data sets; on others it is left out, and a note says so. Empty: any

    @model_validator(mode="after")
    def _one(self) -> Aggregate:
        if sum(bool(getattr(self, kind)) for kind in AGGREGATES) != 1:
            raise ValueError(f"expected one of {', '.join(AGGREGATES)}")
        if self.column != CORRECT and self.kind in ("worst", "errors"):
            raise ValueError(f"column: {self.kind} is for '{CORRECT}' only")
        return self

    @property
    def kind(self) -> str:
        return next(kind for kind in AGGREGATES if getattr(self, kind))

    @property
    def weights(self) -> dict[str, float]:
        """Weights by the names of probes, as written in the suite."""
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

    def is_named(self, name: str) -> bool:
        """Whether a member of an aggregate names it: its label in the suite, or a pattern of labels.

        An axis with a single value is not in the label, but a pattern may name it.
        """
        values = (f"{axis}={written(value)}" for axis, value in self.at.items())
        return name == self.base or any(map(_pattern(name).fullmatch, (self.label, " ".join([self.base, *values]))))


class Suite(Section):
    about: str = ""  # its first line is what `bastion list suites` says
    paper: str | tuple[str, ...] = ()  # whose protocol it is: their recipes have published numbers by its labels
    paper_data: tuple[str, ...] = ()  # data sets that the published numbers are of. Empty: those of the recipes
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
        """Return every variant of every probe and study, in the order of the suite."""
        return [case for kind, label in self._members() for case in self._variants(kind, label)]

    def members(self, aggregate: str) -> dict[str, float]:
        """Return the labels of an aggregate's cases with their weights. Each case counts once."""
        names, weighted = self.aggregates[aggregate].weights, self.aggregates[aggregate].kind in WEIGHTED
        probes = [case for case in self.cases() if case.kind == "probes"]
        named_by: dict[str, str] = {}
        for name in names:
            named = [case.label for case in probes if case.is_named(name)]
            if not named:
                way_out = shlex.quote(f"aggregates.{aggregate}=null")
                raise ValueError(
                    f"aggregates.{aggregate}: no probe '{name}' in this suite; name another one, or leave the "
                    f"aggregate out too: --set {way_out}"
                )
            if weighted and (twice := [label for label in named if label in named_by]):
                raise ValueError(
                    f"aggregates.{aggregate}: '{named_by[twice[0]]}' and '{name}' both name '{twice[0]}', which has "
                    "one weight; leave it to one of them"
                )
            named_by |= dict.fromkeys(named, name)
        return {label: names[name] for label, name in named_by.items()}

    def aggregates_on(self, data: str) -> dict[str, Aggregate]:
        """Return the aggregates that are for this data set."""
        return {name: each for name, each in self.aggregates.items() if not each.only_for or data in each.only_for}

    def resolved(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_defaults=True)

    def _members(self) -> Iterator[tuple[Kind, str]]:
        yield from (("probes", label) for label in self.probes)
        yield from (("studies", label) for label in self.studies)

    def _reaching(self, kind: Kind, label: str) -> dict[str, list[str]]:
        """Return the axes that change a probe or study, with their paths."""
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
            values_text = [f"{name}={written(value)}" for name, value in at.items() if len(self.axes[name].to) > 1]
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
            yield Case(" ".join([label, *values_text]), label, kind, spec, role, merge(content["data"], own_data), at)


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    """Compile a pattern in which only `*` is special."""
    return re.compile(fnmatch.translate(re.sub(r"[\[?]", r"[\g<0>]", name)))


def written(value: Any) -> str:
    """Format a value, floats as `8/255` unless they are short decimals."""
    if not isinstance(value, float):
        return str(value)
    levels = round(255 * value, 2)
    if value != round(value, 3) and abs(255 * value - levels) < 1e-6:
        return f"{levels:g}/255"
    return f"{value:.4g}"


def load_suite(name: str | Path | Mapping[str, Any], changes: Changes = ()) -> Suite:
    """Load a suite by its shipped name (`demo`), its file, its content, or the name of its only probe or study.

    A change such as `eps=4/255` whose key is the name of an axis sets the values of the axis, for images of any size.
    Aggregates that name others are left out, and weighted ones, such as mCE, unless they are of as many variants
    as before. `probes.LABEL=null` leaves a probe out, likewise for aggregates. After any other change, and with fewer
    values of an axis, it is no longer the paper's protocol.
    """
    wanted, where = parse_changes(changes, Suite, once=True), "suite" if isinstance(name, Mapping) else name

    def on_top(content: Mapping[str, Any]) -> dict[str, Any]:
        axes = content.get("axes") or {}
        to_axes = {key: {"to": value, "image_size": None} for key, value in wanted.items() if key in axes}
        rest = {key: value for key, value in wanted.items() if key not in axes}
        if unknown := sorted(rest.keys() - Suite.model_fields.keys()):
            ours = OTHER_NAMES.get(unknown[0])
            near = f"did you mean '{ours}'?" if ours in axes else f"known: {', '.join([*axes, *Suite.model_fields])}"
            raise BastionError(
                f"{where}: {unknown[0]}: unknown key; {near}; a setting of an attack is "
                f"probes.{_attacked(content)}.attack.{unknown[0]}"
            )
        changed = merge(content, merge(rest, {"axes": to_axes} if to_axes else {}), Suite)
        changed |= {part: _without_null(changed[part]) for part in LABELLED if part in changed}
        if (to_axes or "axes" in rest) and changed.get("aggregates"):
            changed["aggregates"] = _of_present_cases(changed, content)
        fewer = any(len(_listed(wanted[name])) < len(_listed(_values(axes[name]))) for name in to_axes)
        return changed if not fewer and (not rest or _only_leaves_out(rest)) else {**changed, "paper": ""}

    return load_yaml(Suite, "suite", name, on_top)


def _of_present_cases(content: Mapping[str, Any], before: Mapping[str, Any]) -> Any:
    """Return the aggregates all of whose members are there; weights are for as many members as there were before."""
    aggregates = content["aggregates"]
    try:
        cases, former = (Suite.model_validate({**each, "aggregates": {}}).cases() for each in (content, before))
        checked = {name: Aggregate.model_validate(each) for name, each in aggregates.items()}
    except ValueError:  # which the whole suite will raise too
        return aggregates

    def is_whole(each: Aggregate) -> bool:
        counts = [[sum(case.is_named(name) for case in some) for name in each.weights] for some in (cases, former)]
        return all(counts[0]) and (each.kind not in WEIGHTED or counts[0] == counts[1])

    return {name: each for name, each in aggregates.items() if is_whole(checked[name])}


def _values(axis: Any) -> Any:
    """Return the values of an axis that is not checked yet."""
    return axis.get("to", ()) if isinstance(axis, Mapping) else ()


def _attacked(content: Mapping[str, Any]) -> str:
    """Return the label of the first probe with an attack."""
    probes = content.get("probes") or {}
    return next((label for label, spec in probes.items() if isinstance(spec, Mapping) and "attack" in spec), "LABEL")


def _without_null(members: Any) -> Any:
    if not isinstance(members, Mapping):
        return members
    return {label: member for label, member in members.items() if member is not None}


def _only_leaves_out(changes: Mapping[str, Any]) -> bool:
    """Whether the changes only leave entries out."""
    return changes.keys() <= set(LABELLED) and not any(map(_without_null, changes.values()))

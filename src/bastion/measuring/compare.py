"""Paired comparison of measured models with a reference model: differences, intervals and McNemar's test. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bastion.errors import BastionError, did_you_mean
from bastion.measuring.convert import convert
from bastion.measuring.facts import Facts, read_measurements
from bastion.measuring.find import find_run, unmeasured
from bastion.measuring.intervals import Estimate
from bastion.measuring.measurement import MeasuredAggregate, MeasuredCase
from bastion.measuring.paired import paired
from bastion.measuring.sampling import estimate_stopped
from bastion.measuring.store import Column
from bastion.recipe import differences
from bastion.run import Run
from bastion.storage import fingerprint

COLUMNS = ("A", "B", "B - A", "95 % interval", "only A", "only B", "p")
LEGEND = "only A, only B: examples that only this one gets right; p: exact McNemar test"


class Row(NamedTuple):
    """An accuracy or rate of a model and of the reference, on the n examples that both were measured on."""

    model: str
    label: str  # of the probe or aggregate
    n: int
    reference_accuracy: Estimate
    accuracy: Estimate
    difference: Estimate  # the model less the reference
    gained: int  # examples that only the model gets right; for real-valued columns, where its value is higher
    lost: int  # examples that only the reference gets right
    p: float | None  # of McNemar's exact test; None for a mean of several probes, and if measuring stopped early


class Changed(NamedTuple):
    """Indices in the split of the examples where two models differ."""

    gained: Column
    lost: Column


@dataclass(frozen=True)
class Comparison:
    """Models compared with a reference. `rows` are plain data; `table()` formats them."""

    reference: str
    data: str
    split: str
    suite: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    _changed: Mapping[tuple[str, str], Changed] = field(default_factory=dict, repr=False, compare=False)

    @property
    def models(self) -> list[str]:
        """Names of the models, without the reference."""
        return list(dict.fromkeys(row.model for row in self.rows))

    def changed(self, label: str, model: str | None = None) -> Changed:
        """Return the examples that only the model gets right, and those that only the reference gets right."""
        chosen = model or self.models[0]
        if (chosen, label) not in self._changed:
            known = [f"'{label}' of {model}" for model, label in self._changed]
            raise BastionError(f"compare: no '{label}' of {chosen} was compared; known: {', '.join(known)}")
        return self._changed[chosen, label]

    def title(self, model: str) -> str:
        counts = sorted({row.n for row in self.rows if row.model == model})
        n = " to ".join(str(count) for count in dict.fromkeys([counts[0], counts[-1]]))
        return "\n".join(
            [
                f"A: {self.reference} (reference)",
                f"B: {model}",
                f"{self.data} ({self.split}), suite {self.suite}, n = {n}; accuracies and rates in %",
            ]
        )

    def table(self) -> str:
        """Return one plain-text table per model."""
        rows = {model: [_cells(row) for row in self.rows if row.model == model] for model in self.models}
        tables = [f"{self.title(model)}\n{_aligned(rows[model])}" for model in self.models]
        return "\n\n".join([*tables, "\n".join([LEGEND, *(f"note: {note}" for note in self.notes)])])


def _cells(row: Row) -> tuple[str, ...]:
    low, high = 100 * row.difference.low, 100 * row.difference.high
    return (
        row.label,
        f"{100 * row.reference_accuracy.value:.2f}",
        f"{100 * row.accuracy.value:.2f}",
        f"{100 * row.difference.value:+.2f}",
        f"[{low:+6.2f}, {high:+6.2f}]",
        str(row.lost),
        str(row.gained),
        "" if row.p is None else f"{row.p:.2g}",
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    lines = [("", *COLUMNS), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([f"{label:<{widths[0]}}", *(f"{cell:>{w}}" for cell, w in zip(cells, widths[1:], strict=True))])
        for label, *cells in lines
    )


def compare(*models: str | Path | Facts, suite: str | None = None) -> Comparison:
    """Compare measured models with the first of them, the reference.

    A model is a run directory, what `bastion measure` was given (`zoo/NAME`, `timm/NAME`, a model folder), or facts.
    If a run has several measurements, the ones with the most probes in common are compared, then those with the most
    examples, then the latest. If it has facts of several models, the one that was measured last is compared.
    """
    if len(models) < 2:
        raise BastionError("compare: give two or more measured models; the first one is the reference")
    chosen = _matching([_measurements(model, suite) for model in models])
    comparison = compare_facts(chosen)
    several = [
        f"{name}: {facts.run.folder} has facts of several models on these images; compared is what was measured last"
        for name, facts, model in zip(_names(chosen), chosen, models, strict=True)
        if not isinstance(model, Facts) and _has_others(facts)
    ]
    return replace(comparison, notes=(*comparison.notes, *several))


def compare_facts(measurements: Sequence[Facts]) -> Comparison:
    """Compare measurements with the first one."""
    first, *others = measurements
    names = _names(measurements)
    rows: list[Row] = []
    changed: dict[tuple[str, str], Changed] = {}
    notes: list[str] = []
    for name, other in zip(names[1:], others, strict=True):
        labels = shared(first, other)
        if not labels:
            raise BastionError(f"compare: {_nothing_shared((names[0], first), (name, other))}")
        for label in labels:
            row, changes = _pair(name, label, first, other)
            rows.append(row)
            changed[name, label] = changes
        notes += _notes((names[0], first), (name, other), labels, rows[-1].n)
    doubted = [name for name, facts in zip(names, measurements, strict=True) if facts.warnings()]
    notes += [f"sanity checks warn about the numbers of {name}; `bastion report` says why" for name in doubted]
    about = first.about
    return Comparison(
        names[0], about.data["name"], about.data["split"], about.suite, tuple(rows), tuple(notes), changed
    )


def shared(a: Facts, b: Facts) -> list[str]:
    """Return the labels of accuracies and rates that both have from the same probe, settings, seed and data."""
    if a.about.data != b.about.data:
        return []
    theirs = {case.label: _case_id(case) for case in b.about.probes}
    same = {case.label for case in a.about.probes if theirs.get(case.label) == _case_id(case)}
    return [case.label for case in a.about.cases if case.has_accuracy and case.label in same] + [
        name
        for name, each in a.about.aggregates.items()
        if _is_rate(each) and each == b.about.aggregates.get(name) and each.members.keys() <= same
    ]


def _is_rate(aggregate: MeasuredAggregate) -> bool:
    """Whether it is in %: of accuracies, errors, flip rates or confidences, but not of distances."""
    return aggregate.bounds is not None


def _case_id(case: MeasuredCase) -> str:
    """Return the folder name: a hash of the probe's settings and revisions, the seed and the variant of the data."""
    return case.store.rpartition("/")[2]


def _pair(model: str, label: str, first: Facts, other: Facts) -> tuple[Row, Changed]:
    index, ours, theirs = np.intersect1d(example_index(first, label), example_index(other, label), return_indices=True)
    by_position = np.argsort(ours)
    index, ours, theirs = index[by_position], ours[by_position], theirs[by_position]
    a, b = _column(first, label)[ours], _column(other, label)[theirs]
    population, bounds = _stopped_within(first, other, len(a)), first.about.bounds(label)
    found = paired(a, b, population, bounds)
    changes = Changed(index[found.gained], index[found.lost])
    accuracies = estimate_stopped(a, population, bounds), estimate_stopped(b, population, bounds)
    counts = len(changes.gained), len(changes.lost)
    return Row(model, label, len(a), *accuracies, found.difference, *counts, found.p), changes


def _stopped_within(first: Facts, other: Facts, n: int) -> int | None:
    """Return the population that the n shared examples are the first of, in random order; None: neither stopped early.

    The random order of fewer examples is the same, so the shared ones are the first in the shorter one's order.
    """
    if first.about.population is None and other.about.population is None:
        return None
    population = min(facts.about.population or facts.n for facts in (first, other))
    return population if n < population else None


def _column(facts: Facts, label: str) -> Column:
    return facts.aggregate_column(label) if label in facts.about.aggregates else facts.correct(label)


def example_index(facts: Facts, label: str) -> Column:
    """Return (n,): the indices in the split of a probe's or an aggregate's examples."""
    aggregate = facts.about.aggregates.get(label)
    return facts.columns[f"{next(iter(aggregate.members)) if aggregate else label}/index"]


def _notes(a: tuple[str, Facts], b: tuple[str, Facts], labels: Sequence[str], n: int) -> list[str]:
    """Return notes on the examples and probes that were left out."""
    (ours, first), (theirs, other) = a, b
    notes = []
    if n < max(first.n, other.n):
        notes.append(f"{ours} has {first.n} examples, {theirs} {other.n}: compared on the {n} that both have")
    if population := _stopped_within(first, other, n):
        notes.append(
            f"{theirs}: measuring stopped early, so intervals are about all {population} examples and valid at any "
            "stopping time; no test is made"
        )
    rest = dict.fromkeys(label for facts in (first, other) for label in _comparable(facts) if label not in labels)
    if rest:
        notes.append(f"{theirs}: not measured with the same settings, so not compared: {', '.join(rest)}")
    if never := dict.fromkeys(label for facts in (first, other) for label in _incomparable(facts)):
        notes.append(f"{theirs}: neither accuracies nor rates of all examples, so not compared: {', '.join(never)}")
    return notes


def _comparable(facts: Facts) -> list[str]:
    aggregates = [name for name, each in facts.about.aggregates.items() if _is_rate(each)]
    return [case.label for case in facts.about.cases if case.has_accuracy] + aggregates


def _incomparable(facts: Facts) -> list[str]:
    """Return two-phase estimates, distances and the like: labels without an accuracy that are in no rate."""
    aggregates = facts.about.aggregates
    told = {label for each in aggregates.values() if _is_rate(each) for label in each.members}
    rest = [case.label for case in facts.about.probes if not case.has_accuracy and case.role != "check"]
    return [label for label in rest if label not in told] + [
        name for name, each in aggregates.items() if not _is_rate(each)
    ]


def _nothing_shared(a: tuple[str, Facts], b: tuple[str, Facts]) -> str:
    """Return one line that says why two measurements cannot be compared."""
    (ours, first), (theirs, other) = a, b
    one, two = first.about, other.about
    for key, what in (("split", "split"), ("name", "data set")):
        if one.data[key] != two.data[key]:
            found = f"{ours} was measured on the {what} {one.data[key]}, {theirs} on {two.data[key]}"
            return f"{found}; measure both on the same"
    if one.data != two.data:
        return f"{ours} and {theirs} were measured on different images of {one.data['name']}; measure both on the same"
    if one.seed != two.seed:
        return f"{ours} was measured with seed {one.seed}, {theirs} with {two.seed}; measure both with the same"
    specs = {case.label: case.spec for case in two.cases if case.has_accuracy}
    for case in one.cases:
        if case.has_accuracy and (changes := differences(case.spec, specs.get(case.label, case.spec))):
            return f"'{case.label}' has other settings in {theirs} than in {ours} ({changes[0]}); use the same for both"
    probes = [", ".join(_comparable(facts)) or "no accuracy" for facts in (first, other)]
    return f"nothing in common: {ours} has {probes[0]}; {theirs} has {probes[1]}; measure both with the same suite"


def _names(measurements: Sequence[Facts]) -> list[str]:
    """Return distinct names: of the models, else of the runs, else folders, else with a hash of the weights."""
    ways: list[Callable[[Facts], str]] = [
        lambda facts: facts.about.model,
        lambda facts: facts.run.name,
        lambda facts: str(facts.run.folder),
        lambda facts: f"{facts.about.model} {facts.about.weights[:8]}",
    ]
    for way in ways:
        names = [way(facts) for facts in measurements]
        if len(set(names)) == len(names):
            return names
    return [f"{facts.about.model} ({number})" for number, facts in enumerate(measurements, 1)]


def _measurements(model: str | Path | Facts, suite: str | None) -> list[Facts]:
    """Return the measurements of the model as it is now, by this suite if one is given."""
    if isinstance(model, Facts):
        return [model]
    run = find_run(model)
    convert(run)
    found = _of_current_weights(run)
    if not found:
        raise unmeasured(model, suite)
    newest = {fingerprint(facts.about.data): facts.about.identity for facts in found}  # they are sorted by age
    found = [facts for facts in found if facts.about.identity == newest[fingerprint(facts.about.data)]]
    chosen = [facts for facts in found if suite in (None, facts.about.suite)]
    if not chosen:
        known = {facts.about.suite for facts in found}
        raise BastionError(f"{model}: not measured with the suite '{suite}'{did_you_mean(suite, known)}")
    return chosen


def _of_current_weights(run: Run) -> list[Facts]:
    card = run.card()
    return [facts for facts in read_measurements(run) if card is None or card.weights == facts.about.weights]


def _has_others(facts: Facts) -> bool:
    """Whether its run also has facts of another model on the same images."""
    identities = {each.about.identity for each in _of_current_weights(facts.run) if each.about.data == facts.about.data}
    return len(identities) > 1


def _matching(candidates: Sequence[list[Facts]]) -> list[Facts]:
    """Choose one measurement per model: those with the most accuracies in common with one of the first model's."""
    suites = set.intersection(*({facts.about.suite for facts in each} for each in candidates))
    if len(suites) > 1:
        raise BastionError(f"compare: all were measured with {', '.join(sorted(suites))}; choose one with --suite")
    first, *others = [[facts for facts in each if not suites or facts.about.suite in suites] for each in candidates]

    def overlap(a: Facts, b: Facts) -> tuple[int, int, str]:
        return len(shared(a, b)), min(a.n, b.n), b.about.created

    def with_matches(a: Facts) -> list[Facts]:
        return [a, *(max(each, key=lambda b: overlap(a, b)) for each in others)]

    def quality(matched: list[Facts]) -> tuple[tuple[int, int, str], str]:
        return min(overlap(matched[0], other) for other in matched[1:]), matched[0].about.created

    return max(map(with_matches, first), key=quality)

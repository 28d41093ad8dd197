"""Tables of runs on the same images, and the accuracies that a report begins with. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bastion import storage
from bastion.errors import BastionError
from bastion.measuring.convert import convert
from bastion.measuring.facts import SHARE, Facts, read_measurements
from bastion.measuring.find import find_run
from bastion.measuring.intervals import Estimate
from bastion.measuring.measurement import MeasuredCase, Measurement, is_of_earlier_code
from bastion.measuring.sanity import SanityWarning
from bastion.measuring.store import Column
from bastion.reporting.axes import is_one_corruption, is_variant, varying, without
from bastion.run import Run
from bastion.suite import CORRECT, written

CORRUPTIONS = "mean over corruptions"
SHOWN_ELSEWHERE = {CORRECT, "in_budget"}  # columns that other sections show; so are distances
FEW = 3  # most radii of a security curve that are also in the chart of accuracies


@dataclass(frozen=True)
class ReportedRun:
    """A run with its name and number on the page; the number stands for a colour and a marker."""

    name: str
    number: int
    files: Run
    measurements: list[Facts]
    history: list[dict[str, Any]]
    weights: str | None = None  # of its current model, if it has one

    def outdated(self, facts: Facts) -> str:
        """Return `weights` or `code` if the run's model has others now than when these facts were measured."""
        if self.weights not in (None, facts.about.weights):
            return "weights"
        return "code" if is_of_earlier_code(facts.about, (each.about for each in self.measurements)) else ""

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Return the log's records of a kind: `step`, `epoch` or `event`."""
        return [record for record in self.history if record.get("kind") == kind]


@dataclass(frozen=True)
class TableRow:
    name: str
    run: ReportedRun
    facts: Facts  # of the examples that all rows of the table have
    measured: int  # examples, perhaps more than the other rows have
    accuracies: dict[str, Estimate]
    warnings: list[SanityWarning]

    @property
    def published(self) -> dict[str, float]:
        """The paper's numbers by label, as fractions."""
        return self.facts.about.published.numbers if self.facts.about.published else {}


@dataclass(frozen=True)
class SharedTable:
    """Runs that were measured with the same probes on the same images: the rows of a table."""

    rows: list[TableRow]
    values: str = ""  # of the suite's axes, if they differ from another table with the same title

    @property
    def about(self) -> Measurement:
        return self.rows[0].facts.about

    @property
    def title(self) -> str:
        about = self.about
        title = f"{about.data['name']}, {about.data['split']} split, suite {about.suite}"
        title = f"{title}, {self.values}" if self.values else title
        return f"{title}; of earlier {self.outdated}" if self.outdated else title

    @property
    def outdated(self) -> str:
        """What of the runs' models is another now than in these facts: `weights`, `code` or nothing."""
        return self.rows[0].run.outdated(self.rows[0].facts)

    @property
    def n(self) -> int:
        return self.rows[0].facts.n

    @property
    def longer(self) -> list[TableRow]:
        """Rows that were measured on more images than the table shows."""
        return [row for row in self.rows if row.measured > self.n]

    @property
    def columns(self) -> list[str]:
        return list(self.rows[0].accuracies)

    @property
    def has_numbers(self) -> bool:
        """Whether there is anything for the section of accuracies; studies have their own figures."""
        facts = self.rows[0].facts
        return bool(facts.accuracies() or self.errors() or self.measures() or facts.checks)

    @property
    def charted(self) -> list[str]:
        """Columns of the chart, without those shown in a security curve."""
        curves = [case.label for case in self.about.cases if case.label in self.columns and is_variant(case, "eps")]
        charted = [label for label in self.columns if len(curves) <= FEW or label not in curves]
        return charted if len(charted) > 1 else []  # a single accuracy needs no chart

    @property
    def chance(self) -> float:
        return 1 / len(self.about.classes)

    @property
    def runs(self) -> list[ReportedRun]:
        return list({row.run.number: row.run for row in self.rows}.values())

    def stages(self) -> dict[str, list[tuple[str, list[Estimate]]]]:
        """Return, per probe with an ensemble attack, its members and every row's accuracy after each."""
        by_row = {label: [row.facts.stages(label) for row in self.rows] for label in self.rows[0].facts.labels}
        return {
            label: [(stage, [stages[stage] for stages in rows]) for stage in rows[0]]
            for label, rows in by_row.items()
            if rows[0] and all(stages.keys() == rows[0].keys() for stages in rows)
        }

    @property
    def papers(self) -> dict[str, list[str]]:
        """Sources of published numbers with their notes, and the names of the rows that have them."""
        found: dict[str, list[str]] = {}
        for row in self.rows:
            if row.facts.about.published:
                found.setdefault(str(row.facts.about.published), []).append(row.name)
        return found

    @property
    def with_warnings(self) -> list[TableRow]:
        return [row for row in self.rows if row.warnings]

    @property
    def without_warnings(self) -> list[TableRow]:
        """Rows whose sanity checks gave no warning."""
        return [row for row in self.rows if row.facts.checks and not row.warnings]

    def name(self, label: str) -> str:
        """Return the label, without the radius that is shown as the threat."""
        cases = [case for case in self.about.cases if case.label == label and case.threat and is_variant(case, "eps")]
        return without(cases[0], "eps") if cases else label

    def threat(self, label: str) -> str:
        """Return `ℓ∞ ≤ 8/255`, empty for a probe without an attack, marked if it is a two-phase estimate."""
        said = [case.qualifier for case in self.about.cases if case.label == label]
        return ", ".join(filter(None, [threat_text(self.rows[0].facts, label), *said]))

    @property
    def phased(self) -> list[str]:
        """Columns that are two-phase estimates."""
        return list(self.rows[0].facts.two_phases())

    def errors(self) -> dict[str, list[Estimate]]:
        """Return sums of error rates or flip rates, such as mCE and mFR, by name: one estimate per row."""
        estimates = [row.facts.errors() for row in self.rows]
        return {name: [each[name] for each in estimates] for name in estimates[0]}

    def measures(self) -> dict[str, list[Estimate]]:
        """Return the other columns, which no section shows, by name: one estimate per row."""
        estimates = [row.facts.estimates() for row in self.rows]
        shared = set.intersection(*(set(each) for each in estimates))  # a column may be of another type elsewhere
        names = [name for name in estimates[0] if name in shared]
        names = [name for name in names if not self._is_shown_elsewhere(*name.rpartition("/")[::2])]
        return {name: [each[name] for each in estimates] for name in names}

    def _is_shown_elsewhere(self, label: str, column: str) -> bool:
        return column in SHOWN_ELSEWHERE or self.rows[0].facts.case(label).kind_of(column) == "distance"

    def meaning(self, name: str) -> str:
        """Return the probe's description of its column `LABEL/COLUMN`."""
        label, _, column = name.rpartition("/")
        return self.rows[0].facts.case(label).meanings.get(column, "")


def read_runs(folders: Iterable[str | Path]) -> list[ReportedRun]:
    """Read the runs, each once. Runs whose folders have the same name are shown by their paths."""
    runs = list({run.folder.resolve(): run for run in map(find_run, folders)}.values())
    if not runs:
        raise BastionError("report: no run was given; give one or more run directories")
    for run in runs:
        convert(run)
    names = [run.name for run in runs]
    return [
        ReportedRun(
            name=run.name if names.count(run.name) == 1 else str(run.folder),
            number=number,
            files=run,
            measurements=read_measurements(run),
            history=run.history(),
            weights=card.weights if (card := run.card()) else None,
        )
        for number, run in enumerate(runs)
    ]


def shared_tables(runs: Sequence[ReportedRun]) -> list[SharedTable]:
    """Group measurements with equal data, split, suite and probes, on the images that all of a group have.

    Sorted by the number of rows, then of images, outdated ones last.
    """
    groups: dict[str, list[tuple[ReportedRun, Facts]]] = {}
    for run in runs:
        for facts in _longest(run.measurements):
            groups.setdefault(_group_key(facts, run.outdated(facts)), []).append((run, facts))
    tables = _with_axis_values([SharedTable(_rows(group)) for group in groups.values()])
    return sorted(tables, key=lambda each: (not each.outdated, len(each.rows), each.n), reverse=True)


def _with_axis_values(tables: Sequence[SharedTable]) -> list[SharedTable]:
    """Add to equal titles the values of axes that differ: `corruption_model=runs/rspc`."""
    values: list[set[tuple[str, str]]] = [
        {(axis, written(value)) for case in each.about.cases for axis, value in case.at.items()} for each in tables
    ]
    result = []
    for each, own in zip(tables, values, strict=True):
        same_title = [others for other, others in zip(tables, values, strict=True) if other.title == each.title]
        differ = sorted(own - own.intersection(*same_title))
        shown = ", ".join(f"{axis}={value}" for axis, value in differ if value != "None")
        result.append(replace(each, values=shown))
    return result


def _longest(measurements: Sequence[Facts]) -> list[Facts]:
    """Drop measurements whose facts are the first ones of a longer measurement."""
    longest: dict[str, Facts] = {}
    for facts in measurements:
        stores = [[case.label, case.store] for case in facts.about.cases]
        key = storage.fingerprint([facts.about.suite, facts.about.population, stores, _aggregates(facts)])
        if key not in longest or facts.n > longest[key].n:
            longest[key] = facts
    return list(longest.values())


def _group_key(facts: Facts, outdated: str) -> str:
    about = facts.about
    cases = [[case.label, case.kind, case.spec, case.at, case.data, sorted(case.columns)] for case in about.cases]
    return storage.fingerprint([about.data, about.suite, about.population, cases, _aggregates(facts), outdated])


def _aggregates(facts: Facts) -> dict[str, Any]:
    return {name: each.model_dump() for name, each in facts.about.aggregates.items()}


def _rows(group: list[tuple[ReportedRun, Facts]]) -> list[TableRow]:
    n = min(facts.n for _, facts in group)
    rows = []
    for run, facts in group:
        name = _row_name(run, facts, [other for owner, other in group if owner is run])
        shared = facts if facts.n == n else facts.first(n)
        rows.append(TableRow(name, run, shared, facts.n, headline(shared), shared.warnings()))
    return rows


def _row_name(run: ReportedRun, facts: Facts, same: Sequence[Facts]) -> str:
    """Name a row; equal measurements of a run get the model, the weights, the seed or the time."""
    if len(same) == 1:
        return run.name
    ways = [("model", ""), ("weights", "weights "), ("seed", "seed "), ("created", "")]
    differ = (way for way in ways if len({getattr(each.about, way[0]) for each in same}) == len(same))
    key, word = next(differ, ways[-1])
    value = str(getattr(facts.about, key))
    return f"{run.name}, {word}{value[:8] if key == 'weights' else value}"


def headline(facts: Facts) -> dict[str, Estimate]:
    """Return the main accuracies, without variants that have their own chart."""
    corrupted = [case.label for case in corruptions(facts)]
    many = set(corrupted) if len(corrupted) > 1 else set()
    many |= {case.label for case in facts.about.cases if is_variant(case, "size") or len(varying(case)) > 1}
    cases = {case.label: case for case in facts.about.cases}
    many |= {name for name, each in facts.about.aggregates.items() if is_one_corruption(each.members, cases)}
    numbers = {label: each for label, each in facts.accuracies().items() if label not in many}
    numbers |= {label: each.population for label, each in facts.two_phases().items()}
    if len(corrupted) > 1 and not _has_mean(facts, corrupted):
        numbers[CORRUPTIONS] = facts.estimate(corruption_mean(facts), SHARE)
    return numbers


def corruptions(facts: Facts) -> list[MeasuredCase]:
    return [case for case in facts.with_role("corruption") if CORRECT in case.columns]


def corruption_mean(facts: Facts) -> Column:
    """Return (n,): the share of corruptions under which an example is classified correctly."""
    return np.asarray(np.mean([facts.correct(case.label) for case in corruptions(facts)], axis=0))


def per_example(facts: Facts, label: str) -> Column:
    """Return (n,): the column that a number of the headline is the mean of; two-phase estimates have none."""
    if label in facts.about.aggregates:
        return facts.aggregate_column(label)
    return facts.correct(label) if label in facts.labels else corruption_mean(facts)


def _has_mean(facts: Facts, labels: Sequence[str]) -> bool:
    aggregates = facts.about.aggregates.values()
    return any(each.kind == "mean" and each.is_accuracy and set(each.members) == set(labels) for each in aggregates)


def threat_text(facts: Facts, label: str) -> str:
    cases = [case for case in facts.about.cases if case.label == label and case.role == "attack" and case.threat]
    return str(cases[0].threat) if cases else ""

"""What the report says in words and rows: who may stand beside whom, and how a number reads. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bastion import storage
from bastion.errors import BastionError
from bastion.measuring.convert import convert
from bastion.measuring.facts import Facts, MeasuredCase, Measurement, read_measurements
from bastion.measuring.intervals import Estimate
from bastion.measuring.sanity import SanityWarning
from bastion.run import Run, open_run


@dataclass(frozen=True)
class ReportedRun:
    """A run, under the name and the mark (colour and marker) that it has on the whole page."""

    name: str
    mark: int
    files: Run
    measurements: list[Facts]
    history: list[dict[str, Any]]
    weights: str | None = None  # of its model as it is now, if it has one

    def is_stale(self, facts: Facts) -> bool:
        """Were these facts measured before the run's model changed?"""
        return self.weights not in (None, facts.about.weights)

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Of the log: `step`, `epoch` or `event`."""
        return [record for record in self.history if record.get("kind") == kind]


@dataclass(frozen=True)
class Row:
    name: str
    run: ReportedRun
    facts: Facts
    accuracies: dict[str, Estimate]
    warnings: list[SanityWarning]


@dataclass(frozen=True)
class Comparison:
    """Runs that were asked the same probes on the same images: only such rows share a table."""

    rows: list[Row]

    @property
    def about(self) -> Measurement:
        return self.rows[0].facts.about

    @property
    def title(self) -> str:
        about = self.about
        title = f"{about.data['name']}, {about.data['split']} split, suite {about.suite}"
        return f"{title}; of earlier weights" if self.stale else title

    @property
    def stale(self) -> bool:
        """Are these facts of weights that the run's model no longer has?"""
        return self.rows[0].run.is_stale(self.rows[0].facts)

    @property
    def n(self) -> int:
        return self.rows[0].facts.n

    @property
    def columns(self) -> list[str]:
        """Probes that vary along two axes would be too many: of them the aggregates stand here."""
        cells = {label for grid in self.rows[0].facts.grids() for label in grid.labels}
        return [label for label in self.rows[0].accuracies if label not in cells]

    @property
    def chance(self) -> float:
        return 1 / len(self.about.classes)

    def stages(self) -> dict[str, list[tuple[str, list[Estimate]]]]:
        """By probe: the members of its ensemble, and every row's accuracy after each."""
        by_row = {label: [row.facts.stages(label) for row in self.rows] for label in self.rows[0].facts.labels}
        return {
            label: [(stage, [stages[stage] for stages in rows]) for stage in rows[0]]
            for label, rows in by_row.items()
            if rows[0] and all(stages.keys() == rows[0].keys() for stages in rows)
        }

    @property
    def doubted(self) -> list[Row]:
        return [row for row in self.rows if row.warnings]

    @property
    def cleared(self) -> list[Row]:
        """Rows that were checked, without a warning."""
        return [row for row in self.rows if row.facts.checks and not row.warnings]

    def threat(self, label: str) -> str:
        """`ℓ∞ ≤ 8/255`, or nothing for a probe without an attack."""
        return threat_text(self.rows[0].facts, label)

    def measures(self) -> dict[str, list[Estimate]]:
        """What was measured besides accuracy: per name, one estimate a row."""
        estimates = [row.facts.estimates() for row in self.rows]
        return {name: [each[name] for each in estimates] for name in estimates[0]}


def read_runs(folders: Iterable[str | Path]) -> list[ReportedRun]:
    """Each run once. Runs whose folders have the same name are told apart by their paths."""
    runs = list({run.folder.resolve(): run for run in map(open_run, folders)}.values())
    if not runs:
        raise BastionError("report: no run was given; give one or more run directories")
    for run in runs:
        convert(run)
    names = [run.name for run in runs]
    return [
        ReportedRun(
            name=run.name if names.count(run.name) == 1 else str(run.folder),
            mark=mark,
            files=run,
            measurements=read_measurements(run),
            history=run.history(),
            weights=(run.card() or {}).get("weights"),
        )
        for mark, run in enumerate(runs)
    ]


def compare(runs: Sequence[ReportedRun]) -> list[Comparison]:
    """Measurements of equal data, split, suite, probes and n together; most rows first, then most images."""
    groups: dict[str, list[tuple[ReportedRun, Facts]]] = {}
    for run in runs:
        for facts in run.measurements:
            groups.setdefault(_question(facts, stale=run.is_stale(facts)), []).append((run, facts))
    comparisons = [Comparison(_rows(group)) for group in groups.values()]
    return sorted(comparisons, key=lambda each: (not each.stale, len(each.rows), each.n), reverse=True)


def _question(facts: Facts, *, stale: bool) -> str:
    about = facts.about
    asked = [[case.label, case.kind, case.spec, case.at, case.n] for case in about.cases]
    aggregates = {name: each.model_dump() for name, each in about.aggregates.items()}
    return storage.fingerprint([about.data, about.suite, about.n, asked, aggregates, stale])


def _rows(group: list[tuple[ReportedRun, Facts]]) -> list[Row]:
    return [
        Row(
            name=_row_name(run, facts, [other for asked, other in group if asked is run]),
            run=run,
            facts=facts,
            accuracies=facts.accuracies(),
            warnings=facts.warnings(),
        )
        for run, facts in group
    ]


def _row_name(run: ReportedRun, facts: Facts, asked: Sequence[Facts]) -> str:
    """What was asked more often in one run is told apart by the model, the weights, the seed or the time."""
    if len(asked) == 1:
        return run.name
    marks = [("model", ""), ("weights", "weights "), ("seed", "seed "), ("created", "")]
    differ = (mark for mark in marks if len({getattr(each.about, mark[0]) for each in asked}) == len(asked))
    key, word = next(differ, marks[-1])
    value = str(getattr(facts.about, key))
    return f"{run.name}, {word}{value[:8] if key == 'weights' else value}"


def summary(comparisons: Sequence[Comparison]) -> str:
    """The first comparison of accuracies in plain words."""
    first = next((comparison for comparison in comparisons if comparison.columns), None)
    if first is None:
        return "No accuracy has been measured yet."
    said = [_verdict(row, spelled_out=position == 0) for position, row in enumerate(first.rows)]
    images = f"{first.n} images of {first.about.data['name']} ({first.about.data['split']})"
    return f"{'; '.join(said)}. Measured on {images}.{_doubt(first)}"


def _doubt(comparison: Comparison) -> str:
    """Nothing, or whose numbers may be wrong."""
    names = [row.name for row in comparison.doubted]
    return f" Sanity checks warn about the numbers of {', '.join(names)}: see below." if names else ""


def _verdict(row: Row, *, spelled_out: bool) -> str:
    """`robust: 47.0 % right on clean images, 26.5 % under attack (ℓ2 ≤ 1)`, or short `standard: 55.0 % and 0.0 %`."""
    clean = [case.label for case in row.facts.with_role("clean") if case.label in row.accuracies]
    others = [case for case in row.facts.about.cases if case.label in row.accuracies and case.label not in clean[:1]]
    worst = [name for name, each in row.facts.about.aggregates.items() if each.kind == "worst"]
    parts = [(label, "right on clean images") for label in clean[:1]]
    parts += [(label, _setting(others)) for label in (worst or [case.label for case in others])[:1]]
    numbers = [f"{percent(row.accuracies[label].value)}\u00a0%" for label, _ in parts]
    if not spelled_out:
        return f"{row.name}: {' and '.join(numbers)}"
    return f"{row.name}: " + ", ".join(f"{number} {words}" for number, (_, words) in zip(numbers, parts, strict=True))


def _setting(cases: Sequence[MeasuredCase]) -> str:
    """What the worst case over these probes is the worst of."""
    if not all(case.role == "attack" for case in cases):
        return "in the worst case"
    if len(cases) > 1:
        return f"under the worst of {len(cases)} attacks"
    threat = cases[0].threat if cases else None
    return f"under attack ({threat})" if threat else "under attack"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"


def interval(estimate: Estimate) -> str:
    return f"{percent(estimate.low)}–{percent(estimate.high)}"


def quantity(value: float) -> str:
    """A number of unknown size, to four digits."""
    return f"{value:.4g}" if math.isfinite(value) else "–"


def threat_text(facts: Facts, label: str) -> str:
    cases = [case for case in facts.about.cases if case.label == label and case.role == "attack" and case.threat]
    return str(cases[0].threat) if cases else ""

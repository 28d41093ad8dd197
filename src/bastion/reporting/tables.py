"""What the report says in words and rows: who may stand beside whom, and how a number reads. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bastion import storage
from bastion.errors import BastionError
from bastion.measuring.intervals import Estimate
from bastion.measuring.sanity import SanityWarning
from bastion.measuring.store import Facts, read_measurements
from bastion.run import Run, open_run

WORST = "worst case"
_NORMS = {"linf": "ℓ∞", "l2": "ℓ2", "l1": "ℓ1"}


@dataclass(frozen=True)
class Subject:
    """A run, under the name and the mark (colour and marker) that it has on the whole page."""

    name: str
    mark: int
    run: Run
    measurements: list[Facts]
    history: list[dict[str, Any]]

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Of the log: `step`, `epoch` or `event`."""
        return [record for record in self.history if record.get("kind") == kind]


@dataclass(frozen=True)
class Row:
    name: str
    subject: Subject
    facts: Facts
    accuracies: dict[str, Estimate]
    warnings: list[SanityWarning]


@dataclass(frozen=True)
class Comparison:
    """Runs that were asked the same probes on the same images: only such rows share a table."""

    rows: list[Row]

    @property
    def about(self) -> dict[str, Any]:
        return self.rows[0].facts.about

    @property
    def title(self) -> str:
        return f"{self.about['data']['name']}, {self.about['split']} split, suite {self.about['suite']}"

    @property
    def n(self) -> int:
        return self.rows[0].facts.n

    @property
    def columns(self) -> list[str]:
        return list(self.rows[0].accuracies)

    @property
    def chance(self) -> float:
        return 1 / len(self.about["classes"])

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
        return threat_text(self.about, label)

    def measures(self) -> dict[str, list[Estimate]]:
        """What was measured besides accuracy: per name, one estimate a row."""
        estimates = [row.facts.estimates() for row in self.rows]
        return {name: [each[name] for each in estimates] for name in estimates[0]}


def read_subjects(folders: Iterable[str | Path]) -> list[Subject]:
    """Each run once. Runs whose folders have the same name are told apart by their paths."""
    runs = list({run.folder.resolve(): run for run in map(open_run, folders)}.values())
    if not runs:
        raise BastionError("report: no run was given; give one or more run directories")
    names = [run.name for run in runs]
    return [
        Subject(
            name=run.name if names.count(run.name) == 1 else str(run.folder),
            mark=mark,
            run=run,
            measurements=read_measurements(run),
            history=run.history(),
        )
        for mark, run in enumerate(runs)
    ]


def compare(subjects: Sequence[Subject]) -> list[Comparison]:
    """Measurements of equal data, split, suite, probes and n together; most rows first, then most images."""
    groups: dict[str, list[tuple[Subject, Facts]]] = {}
    for subject in subjects:
        for facts in subject.measurements:
            groups.setdefault(_question(facts), []).append((subject, facts))
    comparisons = [Comparison(_rows(group)) for group in groups.values()]
    return sorted(comparisons, key=lambda each: (len(each.rows), each.n), reverse=True)


def _question(facts: Facts) -> str:
    keys = ("data", "split", "suite", "n", "described")
    return storage.fingerprint({key: facts.about[key] for key in keys})


def _rows(group: list[tuple[Subject, Facts]]) -> list[Row]:
    return [
        Row(
            name=_row_name(subject, facts, [other for asked, other in group if asked is subject]),
            subject=subject,
            facts=facts,
            accuracies=facts.accuracies(),
            warnings=facts.warnings(),
        )
        for subject, facts in group
    ]


def _row_name(subject: Subject, facts: Facts, asked: Sequence[Facts]) -> str:
    """What was asked more often in one run is told apart by the model, the seed or the time."""
    if len(asked) == 1:
        return subject.name
    marks = [("model", ""), ("seed", "seed "), ("created", "")]
    key, word = next((mark for mark in marks if len({each.about[mark[0]] for each in asked}) == len(asked)), marks[-1])
    return f"{subject.name}, {word}{facts.about[key]}"


def attacked(facts: Facts, label: str) -> bool:
    return f"{label}/in_budget" in facts.columns


def summary(comparisons: Sequence[Comparison]) -> str:
    """The first comparison of accuracies in plain words."""
    first = next((comparison for comparison in comparisons if comparison.columns), None)
    if first is None:
        return "No accuracy has been measured yet."
    said = [_verdict(row, spelled_out=position == 0) for position, row in enumerate(first.rows)]
    images = f"{first.n} images of {first.about['data']['name']} ({first.about['split']})"
    return f"{'; '.join(said)}. Measured on {images}.{_doubt(first)}"


def _doubt(comparison: Comparison) -> str:
    """Nothing, or whose numbers may be wrong."""
    names = [row.name for row in comparison.doubted]
    return f" Sanity checks warn about the numbers of {', '.join(names)}: see below." if names else ""


def _verdict(row: Row, *, spelled_out: bool) -> str:
    """`robust: 47.0 % right on clean images, 26.5 % under attack (ℓ2 ≤ 1)`, or short `standard: 55.0 % and 0.0 %`."""
    clean = [label for label in row.accuracies if label != WORST and not attacked(row.facts, label)]
    others = [label for label in row.accuracies if label != WORST and label not in clean[:1]]
    worst = WORST if WORST in row.accuracies else others[0] if others else None
    parts = [(label, "right on clean images") for label in clean[:1]]
    parts += [(label, _setting(row.facts, others)) for label in [worst] if label]
    numbers = [f"{percent(row.accuracies[label].value)}\u00a0%" for label, _ in parts]
    if not spelled_out:
        return f"{row.name}: {' and '.join(numbers)}"
    return f"{row.name}: " + ", ".join(f"{number} {words}" for number, (_, words) in zip(numbers, parts, strict=True))


def _setting(facts: Facts, labels: list[str]) -> str:
    """What the worst case over these probes is the worst of."""
    if not all(attacked(facts, label) for label in labels):
        return "in the worst case"
    if len(labels) > 1:
        return f"under the worst of {len(labels)} attacks"
    threat = threat_text(facts.about, labels[0])
    return f"under attack ({threat})" if threat else "under attack"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"


def interval(estimate: Estimate) -> str:
    return f"{percent(estimate.low)}–{percent(estimate.high)}"


def quantity(value: float) -> str:
    """A number of unknown size, to four digits."""
    return f"{value:.4g}" if math.isfinite(value) else "–"


def threat_text(about: dict[str, Any], label: str) -> str:
    threat = about.get("threats", {}).get(label)
    return f"{_NORMS.get(threat['norm'], threat['norm'])} ≤ {eps_text(threat['eps'])}" if threat else ""


def eps_text(eps: float) -> str:
    """As people write it: `8/255`, unless it is a short decimal."""
    levels = round(255 * eps, 2)
    if eps != round(eps, 3) and abs(255 * eps - levels) < 1e-6:
        return f"{levels:g}/255"
    return f"{eps:.4g}"

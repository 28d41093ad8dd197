"""A measured suite, read back: which facts it is made of, and what they amount to. No torch."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from bastion import storage
from bastion.errors import BastionError, printable
from bastion.measuring import sanity, table
from bastion.measuring.grids import Grid, grids
from bastion.measuring.intervals import Estimate, bounded_mean
from bastion.measuring.measurement import DISTANCE, PHASES, MeasuredCase, Measurement
from bastion.measuring.sampling import TwoPhase, estimate_stopped, two_phase
from bastion.measuring.store import Column, FactStore
from bastion.run import Run
from bastion.suite import CORRECT, Role


class Columns(Mapping[str, Column]):
    """`"pgd-20/correct"` -> (n,). A column is read when it is asked for."""

    def __init__(self, run: Run, about: Measurement) -> None:
        self._run, self._about = run, about
        self._cases = {f"{case.label}/{name}": (case, name) for case in about.cases for name in case.columns}
        self._read: dict[str, Column] = {}

    def __getitem__(self, key: str) -> Column:
        if key not in self._read:
            case, name = self._cases[key]
            self._read[key] = FactStore(self._run.facts / case.store).read([name], self._about.positions(case))[name]
        return self._read[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cases)

    def __len__(self) -> int:
        return len(self._cases)


@dataclass(frozen=True)
class Facts:
    """One measurement. `columns` has one row per example."""

    run: Run
    about: Measurement
    columns: Mapping[str, Column] = field(repr=False)
    kept: Mapping[str, dict[str, Column]] | None = field(default=None, repr=False)  # pictures; None: they are in files

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name} {100 * each.value:.2f} %" for name, each in self.numbers().items())
        return f"<{self.about.model} on {self.about.data['name']}, n = {self.n}: {numbers or 'no accuracies'}>"

    def in_memory(self) -> Facts:
        """With everything read, so that the files may go."""
        kept = {case.label: self.pictures(case.label) for case in self.about.cases if case.kind == "probes"}
        return Facts(self.run, self.about, {name: self.columns[name] for name in self.columns}, kept)

    def rows(self) -> dict[str, Column]:
        """Every fact of one value per example by name, with `index` and `label` once in front."""
        names = [name for name in self.columns if self.case(name.rpartition("/")[0]).kind == "probes"]
        shared = {each: next(name for name in names if name.endswith(f"/{each}")) for each in ("index", "label")}
        own = [name for name in names if name.rpartition("/")[2] not in shared and self.columns[name].ndim == 1]
        return {name: self.columns[key] for name, key in shared.items()} | {name: self.columns[name] for name in own}

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row per example."""
        try:
            import pandas
        except ImportError as error:
            raise BastionError("to_frame: needs pandas; `pip install pandas`, or use to_csv or columns") from error
        return pandas.DataFrame(self.rows())

    def to_csv(self, path: str | Path) -> None:
        """One line per example."""
        rows, file = self.rows(), io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows)
        writer.writerows(zip(*(column.tolist() for column in rows.values()), strict=True))
        storage.write_text(Path(path), file.getvalue())

    def adversarial(self, label: str) -> Column:
        """(n, C, H, W) what the attack of a probe made of every example, as float32 in [0, 1]."""
        pictures = self.pictures(label)
        if "adversarial" not in pictures or len(pictures["position"]) < self.n:
            count = len(pictures.get("position", ()))
            raise BastionError(
                f"adversarial examples of '{label}' were kept of {count} of the {self.n} examples; measure in a new "
                'folder with keep="all" (on the command line --keep all)'
            )
        return pictures["adversarial"][np.argsort(pictures["position"])]

    @property
    def labels(self) -> list[str]:
        return [case.label for case in self.about.cases]

    @property
    def n(self) -> int:
        return self.about.n

    def case(self, label: str) -> MeasuredCase:
        for case in self.about.cases:
            if case.label == label:
                return case
        raise BastionError(f"no probe '{label}' in this measurement; it has {', '.join(self.labels)}")

    def at(self, label: str, column: str, positions: Column) -> Column:
        """The column's rows of the examples at these positions, such as those that have pictures."""
        return np.asarray(self.columns[f"{label}/{column}"][self.row_numbers(label, positions)])

    def with_role(self, *roles: Role) -> list[MeasuredCase]:
        return [case for case in self.about.cases if case.kind == "probes" and case.role in roles]

    def estimate(self, column: Column) -> Estimate:
        """With its interval; of a measurement that stopped early, one about all examples that is valid all the same."""
        return estimate_stopped(column, self.about.population)

    def first(self, n: int) -> Facts:
        """Of the first n examples alone, as if no more had been measured."""
        cases = tuple(
            case.model_copy(update={"n": min(n, case.n)}) if case.kind == "probes" else case
            for case in self.about.cases
        )
        about = self.about.model_copy(update={"n": min(n, self.n), "cases": cases, "summary": {}, "doubts": ()})
        return Facts(self.run, about, Columns(self.run, about))

    def correct(self, label: str) -> Column:
        """(n,) bool: right under this probe."""
        return self.columns[f"{label}/{CORRECT}"]

    def accuracies(self) -> dict[str, Estimate]:
        """Of every probe that says what is right, and the aggregates that are accuracies."""
        labels = [case.label for case in self.about.cases if case.kind == "probes" and CORRECT in case.columns]
        result = {label: self.estimate(self.correct(label)) for label in labels}
        shared = [name for name, each in self.about.aggregates.items() if each.is_accuracy]
        return result | {name: self.aggregate(name) for name in shared}

    def errors(self) -> dict[str, Estimate]:
        """The other aggregates: weighted sums of error rates or flip rates, such as mCE and mFR."""
        return {name: self.aggregate(name) for name, each in self.about.aggregates.items() if not each.is_accuracy}

    def aggregate(self, name: str) -> Estimate:
        column, bounds = self.aggregate_column(name), self.about.aggregates[name].bounds
        if column.dtype == bool or bounds is None:
            return self.estimate(column)
        return bounded_mean(column, *bounds)

    def aggregate_column(self, name: str) -> Column:
        """(n,): made example by example, so that its interval knows that all probes saw the same examples.

        NaN where a member has no finite number, such as the distance of an example that nothing fooled.
        """
        chosen = self.about.aggregates[name]
        for label in chosen.members:
            if f"{label}/{chosen.column}" not in self.columns:
                raise BastionError(f"aggregates.{name}: the probe '{label}' has no facts '{chosen.column}'")
        columns = [self.columns[f"{label}/{chosen.column}"] for label in chosen.members]
        if chosen.kind == "worst":
            return np.asarray(np.logical_and.reduce(columns))
        if chosen.kind == "errors":
            columns = [~column for column in columns]
        known = np.logical_and.reduce([np.isfinite(column) for column in columns])
        rows = np.stack(columns)[:, known]
        column = np.full(len(known), np.nan)
        column[known] = rows.mean(0) if chosen.kind == "mean" else np.array([*chosen.members.values()]) @ rows
        return column

    def two_phase(self, label: str) -> TwoPhase:
        """Of a probe that runs its costly attacks on a sample of the survivors: accuracy after all of them."""
        survived, sampled, lost = (self.columns[f"{label}/{name}"] for name in PHASES)
        return two_phase(survived, sampled, lost)

    def two_phases(self) -> dict[str, TwoPhase]:
        """Of every probe that has such an estimate."""
        found = [label for label in self.labels if all(f"{label}/{name}" in self.columns for name in PHASES)]
        return {label: self.two_phase(label) for label in found}

    def grids(self) -> list[Grid]:
        """Of probes that vary along two axes, such as type and severity of a corruption."""
        return grids(self.about.cases, self.accuracies())

    def numbers(self) -> dict[str, Estimate]:
        """All estimates that sum the measurement up. Those of two phases have an interval about all images too."""
        phased = {label: each.population for label, each in self.two_phases().items()}
        return self.accuracies() | phased | self.errors()

    def estimates(self) -> dict[str, Estimate]:
        """Every other column of one yes or no or real number per example; sanity checks and studies aside."""
        labels = {case.label for case in self.about.cases if case.kind == "probes"}
        columns = {
            name: self.columns[name]
            for name in self.columns
            if name.rpartition("/")[0] in labels and not name.endswith(f"/{CORRECT}") and not sanity.is_check(name)
        }
        return {
            name: self.estimate(column)
            for name, column in columns.items()
            if column.dtype.kind in "bf" and column.ndim == 1
        }

    def studies(self) -> dict[str, dict[str, Column]]:
        """By label and name, each with the study's parts along its first axis."""
        return {
            case.label: {name: self.columns[f"{case.label}/{name}"] for name in case.columns}
            for case in self.about.cases
            if case.kind == "studies"
        }

    def scalars(self) -> dict[str, float]:
        """Of studies, what is one number: by label/name."""
        return {
            f"{label}/{name}": values.item()
            for label, columns in self.studies().items()
            for name, values in columns.items()
            if values.size == 1
        }

    def stages(self, label: str) -> dict[str, Estimate]:
        """Of a probe whose attack is an ensemble: accuracy after each of its members."""
        members = self.case(label).members
        if not members or not {f"{label}/fooled_by", f"{label}/{CORRECT}"} <= self.columns.keys():
            return {}
        by = self.columns[f"{label}/fooled_by"]
        right = self.correct(label) | (by >= 0)  # before the first of them
        return {
            f"{number + 1}. {name}": self.estimate(right & ~((by >= 0) & (by <= number)))
            for number, name in enumerate(members)
        }

    def curve(self, label: str, radii: Sequence[float]) -> dict[float, Estimate]:
        """The security curve: accuracy at each radius, from the distances of one search per example.

        An example is right at a radius if the nearest adversarial example is further away; clean mistakes have
        distance 0. An upper bound at every radius, as any attack's accuracy is.
        """
        case = self.case(label)
        if DISTANCE not in case.columns or CORRECT in case.columns:
            raise BastionError(f"curve: '{label}' does not tell the smallest distance; the probe distortion does")
        distance = self.columns[f"{label}/{DISTANCE}"]
        return {radius: self.estimate((distance > radius) & (distance > 0)) for radius in radii}

    def pictures(self, label: str) -> dict[str, Column]:
        """Kept of the first examples: `position`, and whatever the probe shows."""
        case = self.case(label)
        if self.kept is not None:
            return self.kept[label]
        return FactStore(self.run.facts / case.store).pictures(self.about.positions(case))

    def row_numbers(self, label: str, positions: Column) -> Column:
        """Where examples are in the columns: not at their positions in the split, if the measurement stopped early."""
        return np.searchsorted(self.about.positions(self.case(label)), positions)

    @property
    def checks(self) -> int:
        """How many sanity checks were made."""
        return sum(map(sanity.is_check, self.columns))

    def warnings(self) -> list[sanity.SanityWarning]:
        """Why the accuracies should not be trusted, as far as the sanity checks can tell."""
        checked = {name: self.columns[name] for name in self.columns if sanity.is_check(name)}
        return [*self._accuracy_warnings(), *sanity.warnings(checked)]

    def _accuracy_warnings(self) -> list[sanity.SanityWarning]:
        """Of clean accuracy: what no attack can be asked about."""
        labels = [case.label for case in self.with_role("clean") if CORRECT in case.columns and "label" in case.columns]
        if not labels or self.n < sanity.FEWEST:
            return []
        right, y = self.correct(labels[0]), self.columns[f"{labels[0]}/label"]
        return sanity.accuracy_warnings(labels[0], right, y, len(self.about.classes))

    def table(self) -> str:
        """Accuracy with its 95 % interval per probe and aggregate, what the paper printed, and warnings, as text."""
        return table.table(self)

    def _repr_html_(self) -> str:
        return table.html(self)


def write_measurement(run: Run, about: Measurement, *, changed: bool = True) -> Facts:
    """Store the measurement. If no fact changed and a stored one says the same, keep that one with its date."""
    path = _path(run, about, stopped=about.population is not None)
    stored = None if changed else _stored(path)
    if stored and stored == about.model_copy(update=_passing(stored)):
        return Facts(run, stored, Columns(run, stored))
    facts = Facts(run, about, Columns(run, about))
    doubts = tuple(dict.fromkeys(warning.code for warning in facts.warnings()))
    scalars = {name: value for name, value in facts.scalars().items() if math.isfinite(value)}
    about = about.model_copy(update={"summary": facts.numbers(), "scalars": scalars, "doubts": doubts})
    storage.write_json(path, about.model_dump(mode="json"))
    if about.population is None:
        _path(run, about, stopped=True).unlink(missing_ok=True)  # it has gone on to the end
    return Facts(run, about, facts.columns)


def _path(run: Run, about: Measurement, *, stopped: bool) -> Path:
    """One that stopped early has the same file however far it went."""
    stores: Any = {case.label: [case.store, case.n] for case in about.cases}
    if stopped:
        stores = ["stopped", {case.label: case.store for case in about.cases}]
    named = [stores, about.population or about.n]
    return run.measurements / f"{about.suite[:50]}-{storage.fingerprint(named, digits=8)}.json"


def _passing(stored: Measurement) -> dict[str, Any]:
    """What may differ in a measurement that says the same, or is made from its facts."""
    return {key: getattr(stored, key) for key in ("created", "command", "machine", "summary", "scalars", "doubts")}


def _stored(path: Path) -> Measurement | None:
    try:
        return _read(path)
    except BastionError:  # not there, or damaged
        return None


def _read(path: Path) -> Measurement:
    try:
        return Measurement.model_validate(_shown(storage.read_json(path)))
    except ValidationError as error:
        first = error.errors()[0]
        what = ".".join(map(str, first["loc"]))
        raise BastionError(
            f"{path}: not a measurement ({what}: {first['msg'].lower()}); remove it and measure again"
        ) from error


def _shown(content: Any) -> Any:
    """All text of it as it may stand in tables and pages."""
    if isinstance(content, dict):
        return {_shown(key): _shown(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_shown(each) for each in content]
    return printable(content) if isinstance(content, str) else content


def read_measurements(run: Run) -> list[Facts]:
    """All finished measurements of a run, oldest first."""
    stored = [_read(path) for path in storage.files(run.measurements, "*.json")]
    return [Facts(run, about, Columns(run, about)) for about in sorted(stored, key=lambda each: each.created)]

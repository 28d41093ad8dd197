"""`Facts`: a stored measurement with its columns, estimates, tables and exports. No torch."""

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
from bastion.errors import BastionError, did_you_mean, printable
from bastion.measuring import sanity, table
from bastion.measuring.export import write_npz, write_pictures
from bastion.measuring.find import slug
from bastion.measuring.grids import AccuracyGrid, grids
from bastion.measuring.intervals import Estimate
from bastion.measuring.measurement import PHASES, MeasuredCase, Measurement, is_of_earlier_code
from bastion.measuring.sampling import TwoPhase, estimate_stopped, two_phase
from bastion.measuring.store import Column, FactStore
from bastion.run import Run, first_mistake
from bastion.suite import CORRECT, SHARES, Role

SHARE = (0.0, 1.0)  # bounds of a share, such as that of the probes under which an example is right


class Columns(Mapping[str, Column]):
    """Columns by name: `"pgd-20/correct"` -> (n,). Each is read on first use."""

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


class ByLabel(dict[str, Estimate]):
    """Estimates by label; a label that is not there is an error that says which are."""

    def __missing__(self, label: object) -> Estimate:
        stored = str(label).replace("/", "∕")  # of attacks whose settings have fractions
        if stored in self:
            return self[stored]
        raise BastionError(f"no accuracy '{label}'{did_you_mean(label, self)}")


@dataclass(frozen=True)
class Facts:
    """One measurement. `columns` has one row per example."""

    run: Run
    about: Measurement
    columns: Mapping[str, Column] = field(repr=False)
    kept: Mapping[str, dict[str, Column]] | None = field(default=None, repr=False)  # pictures; None: they are in files

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name} {value} {interval}" for name, _, value, interval in table.numbers(self))
        return f"<{self.about.model} on {self.about.data['name']}, n = {self.n}: {numbers or 'no accuracies'}>"

    def in_memory(self) -> Facts:
        """Return a copy with everything read, so that the files may be removed."""
        kept = {case.label: self.pictures(case.label) for case in self.about.probes}
        return Facts(self.run, self.about, {name: self.columns[name] for name in self.columns}, kept)

    def rows(self) -> dict[str, Column]:
        """Return all columns with one value per example, by name; `index` and `label` come first, once."""
        names = [f"{case.label}/{name}" for case in self.about.probes for name in case.columns]
        if not names:
            raise BastionError("no column has one value per example: the suite has only studies; use `studies()`")
        shared = {each: next(name for name in names if name.endswith(f"/{each}")) for each in ("index", "label")}
        own = [name for name in names if name.rpartition("/")[2] not in shared and self.columns[name].ndim == 1]
        return {name: self.columns[key] for name, key in shared.items()} | {name: self.columns[name] for name in own}

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per example."""
        try:
            import pandas
        except ImportError as error:
            raise BastionError("to_frame: needs pandas; `pip install pandas`, or use to_csv or columns") from error
        return pandas.DataFrame(self.rows())

    def to_csv(self, path: str | Path) -> None:
        """Write a CSV file with one line per example."""
        rows, file = self.rows(), io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows)
        writer.writerows(zip(*(column.tolist() for column in rows.values()), strict=True))
        storage.write_text(Path(path), file.getvalue())

    def adversarial(self, label: str | None = None) -> Column:
        """Return a probe's adversarial examples, (n, C, H, W) float32 in [0, 1]; if only one has some, its."""
        if label is None:
            label, *others = self._attacked()
            if others:
                raise BastionError(f"adversarial: give one of {', '.join([label, *others])}")
        pictures = self.pictures(label)
        if "adversarial" not in pictures or len(pictures["position"]) < self.n:
            count = len(pictures["position"]) if "adversarial" in pictures else 0
            again = 'evaluate with keep="all"'
            if self.kept is None:
                again = 'measure with keep="all" (on the command line --keep all)'
            raise BastionError(
                f"adversarial examples of '{label}' were kept of {count} of the {self.n} examples; {again}"
            )
        return pictures["adversarial"][np.argsort(pictures["position"])]

    def export(self, path: str | Path, label: str | None = None) -> None:
        """Write adversarial examples, of all of a suite's attacks or of one; they need `keep="all"`.

        To a file, `adv.npz`, those of one attack: `x` (n, C, H, W) float32 in [0, 1], the true class `y`, `index` and
        `fooled`. To a folder: INDEX.png, and the rest in `examples.csv`; with several attacks in a folder for each.
        Pixels of a PNG are rounded to bytes, which may undo a small perturbation.
        """
        labels, npz = [label] if label is not None else self._attacked(), Path(path).suffix == ".npz"
        if npz and len(labels) > 1:
            one = f"{path} takes the examples of one of {', '.join(labels)}"
            raise BastionError(f"export: {one}; choose one, or a folder")
        for each in labels:
            x, y = self.adversarial(each), self.columns[f"{each}/label"]
            known = self.case(each).has_accuracy
            fooled = ~self.correct(each) if known else self.columns[f"{each}/prediction"] != y
            examples = {"x": x, "y": y, "index": self.columns[f"{each}/index"], "fooled": fooled}
            if npz:
                write_npz(Path(path), examples)
            else:
                write_pictures(Path(path) / slug(each) if len(labels) > 1 else Path(path), examples)

    def _attacked(self) -> list[str]:
        """Return the probes that have adversarial examples."""
        found = [case.label for case in self.about.probes if "adversarial" in self.pictures(case.label)]
        if not found:
            raise BastionError('no adversarial examples were kept; use a suite with an attack, and keep="all"')
        return found

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
        """Return a column's rows of the examples at these positions, such as those that have pictures."""
        return np.asarray(self.columns[f"{label}/{column}"][self.row_numbers(label, positions)])

    def with_role(self, *roles: Role) -> list[MeasuredCase]:
        return [case for case in self.about.probes if case.role in roles]

    def estimate(self, column: Column, bounds: tuple[float, float] | None = None) -> Estimate:
        """Return the mean with its interval: one that allows for measuring having stopped early, of a bool column and
        of one within bounds, such as a share of probes.

        A bool column may be of some of the examples, such as one class; its confidence sequence is then wider than it
        need be. Other columns are of all examples.
        """
        return estimate_stopped(column, self.about.population, bounds)

    def first(self, n: int) -> Facts:
        """Return the facts of the first n examples only."""
        cases = tuple(
            case.model_copy(update={"n": min(n, case.n)}) if case.kind == "probes" else case
            for case in self.about.cases
        )
        about = self.about.model_copy(update={"n": min(n, self.n), "cases": cases, "summary": {}, "doubts": ()})
        return Facts(self.run, about, Columns(self.run, about))

    def correct(self, label: str) -> Column:
        """Return (n,) bool: classified correctly under this probe."""
        return self.columns[f"{label}/{CORRECT}"]

    def __getitem__(self, label: str) -> Estimate:
        """Return the accuracy of a probe or an aggregate: `facts["pgd"]`."""
        return ByLabel(self.numbers())[label]

    def accuracies(self) -> dict[str, Estimate]:
        """Return the accuracy of every probe with a column `correct`, and of the aggregates that are accuracies."""
        result = {case.label: self.estimate(self.correct(case.label)) for case in self.about.cases if case.has_accuracy}
        shared = [name for name, each in self.about.aggregates.items() if each.is_accuracy]
        return ByLabel(result | {name: self.aggregate(name) for name in shared})

    def errors(self) -> dict[str, Estimate]:
        """Return the other aggregates: weighted sums of error rates or flip rates, such as mCE and mFR."""
        return {name: self.aggregate(name) for name, each in self.about.aggregates.items() if not each.is_accuracy}

    def aggregate(self, name: str) -> Estimate:
        return self.estimate(self.aggregate_column(name), self.about.bounds(name))

    def aggregate_column(self, name: str) -> Column:
        """Return (n,): the aggregate of each example, so that the interval allows for probes sharing examples.

        NaN where a member is not finite, such as the distance of an example that was not fooled.
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
        """Return the accuracy of a probe that ran its second attack on a sample of the first one's survivors."""
        survived, sampled, lost = (self.columns[f"{label}/{name}"] for name in PHASES)
        return two_phase(survived, sampled, lost)

    def two_phases(self) -> dict[str, TwoPhase]:
        """Return the two-phase estimates of all probes that have one."""
        return {case.label: self.two_phase(case.label) for case in self.about.cases if case.is_two_phase}

    def grids(self) -> list[AccuracyGrid]:
        """Return the accuracies of probes with two axes, such as type and severity of a corruption."""
        return grids(self.about.cases, self.accuracies())

    def numbers(self) -> dict[str, Estimate]:
        """Return the estimates of the summary: accuracies, two-phase accuracies and error aggregates."""
        phased = {label: each.population for label, each in self.two_phases().items()}
        return self.accuracies() | phased | self.errors()

    def estimates(self) -> dict[str, Estimate]:
        """Return the mean of every other bool or float column, without sanity checks and studies."""
        probes, found = {case.label: case for case in self.about.probes}, {}
        for key in self.columns:
            label, _, name = key.rpartition("/")
            if label not in probes or name == CORRECT or sanity.is_check(key):
                continue
            column, is_share = self.columns[key], probes[label].kind_of(name) in SHARES
            if column.dtype.kind in "bf" and column.ndim == 1:
                found[key] = self.estimate(column, SHARE if is_share else None)
        return found

    def studies(self) -> dict[str, dict[str, Column]]:
        """Return the arrays of studies by label and name; the first axis is the study's parts."""
        return {
            case.label: {name: self.columns[f"{case.label}/{name}"] for name in case.columns}
            for case in self.about.studies
        }

    def scalars(self) -> dict[str, float]:
        """Return the single numbers of studies by `label/name`."""
        return {
            f"{label}/{name}": values.item()
            for label, columns in self.studies().items()
            for name, values in columns.items()
            if values.size == 1 and not sanity.is_check(f"{label}/{name}")
        }

    def stages(self, label: str) -> dict[str, Estimate]:
        """Return the accuracy after each member of a probe's ensemble attack."""
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
        """Return the security curve: accuracy at each radius, from one minimal distance per example.

        An example is robust at a radius if its nearest adversarial example is further away; clean mistakes have
        distance 0. Like the accuracy under any attack, it is an upper bound.
        """
        column = self.case(label).minimal_distance
        if column is None:
            raise BastionError(f"curve: '{label}' has no minimal distances; measure with the probe distortion")
        distance = self.columns[f"{label}/{column}"]
        return {radius: self.estimate((distance > radius) & (distance > 0)) for radius in radii}

    def pictures(self, label: str) -> dict[str, Column]:
        """Return the stored pictures of the first examples, with their `position`."""
        case = self.case(label)
        if self.kept is not None:
            return self.kept[label]
        return FactStore(self.run.facts / case.store).pictures(self.about.positions(case))

    def row_numbers(self, label: str, positions: Column) -> Column:
        """Return the rows of these positions in the columns; they differ if measuring stopped early."""
        return np.searchsorted(self.about.positions(self.case(label)), positions)

    @property
    def checks(self) -> int:
        """Number of sanity checks that were run."""
        return sum(map(sanity.is_check, self.columns))

    def warnings(self) -> list[sanity.SanityWarning]:
        """Return the warnings of the sanity checks."""
        checked = {name: self.columns[name] for name in self.columns if sanity.is_check(name)}
        studies = {case.label for case in self.about.studies}
        clean = [self.correct(case.label) for case in self.with_role("clean") if case.has_accuracy]
        accuracy = float(clean[0].mean()) if clean else 1.0
        return [*self._accuracy_warnings(), *sanity.warnings(checked, accuracy, studies)]

    def _accuracy_warnings(self) -> list[sanity.SanityWarning]:
        """Return warnings about clean accuracy."""
        labels = [case.label for case in self.with_role("clean") if case.has_accuracy and "label" in case.columns]
        if not labels or self.n < sanity.FEWEST:
            return []
        right, y = self.correct(labels[0]), self.columns[f"{labels[0]}/label"]
        return sanity.accuracy_warnings(labels[0], right, y, len(self.about.classes))

    def table(self) -> str:
        """Return a text table: accuracy with its 95 % interval per probe and aggregate, paper's numbers, warnings."""
        return table.table(self)

    def _repr_html_(self) -> str:
        return table.html(self)


def write_measurement(run: Run, about: Measurement, *, changed: bool = True) -> Facts:
    """Store the measurement. If no fact changed and a stored one says the same, keep that one with its date.

    Not if other code was measured since: the newest measurement is that of the model as it is now.
    """
    path = _path(run, about, stopped=about.population is not None)
    stored = None if changed else _stored(path)
    is_same = stored and stored == about.model_copy(update=_volatile(stored))
    if stored and is_same and not is_of_earlier_code(stored, _readable(run)):
        return Facts(run, stored, Columns(run, stored))
    facts = Facts(run, about, Columns(run, about))
    doubts = tuple(dict.fromkeys(warning.code for warning in facts.warnings()))
    scalars = {name: value for name, value in facts.scalars().items() if math.isfinite(value)}
    about = about.model_copy(update={"summary": facts.numbers(), "scalars": scalars, "doubts": doubts})
    storage.write_json(path, about.model_dump(mode="json"))
    if about.population is None:
        storage.remove(_path(run, about, stopped=True))  # it was completed
    return Facts(run, about, facts.columns)


def _path(run: Run, about: Measurement, *, stopped: bool) -> Path:
    """Return the file of a measurement; one that stopped early has the same file however many examples it has."""
    stores: Any = {case.label: [case.store, case.n] for case in about.cases}
    if stopped:
        stores = ["stopped", {case.label: case.store for case in about.cases}]
    named = [stores, about.population or about.n]
    return run.measurements / f"{about.suite[:50]}-{storage.fingerprint(named, digits=8)}.json"


def _volatile(stored: Measurement) -> dict[str, Any]:
    """Return the fields that may differ between equal measurements, or are computed from the facts."""
    keys = ("created", "command", "machine", "summary", "scalars", "doubts", "seconds")
    return {key: getattr(stored, key) for key in keys}


def _stored(path: Path) -> Measurement | None:
    try:
        return _read(path)
    except BastionError:  # not there, or damaged
        return None


def _readable(run: Run) -> list[Measurement]:
    return [each for path in storage.files(run.measurements, "*.json") if (each := _stored(path))]


def _read(path: Path) -> Measurement:
    try:
        return Measurement.model_validate(_printable(storage.read_json(path)))
    except ValidationError as error:
        raise BastionError(
            f"{path}: not a measurement ({first_mistake(error)}); remove it and measure again"
        ) from error
    except RecursionError as error:
        raise BastionError(f"{path}: not a measurement (too deep in itself); remove it and measure again") from error


def _printable(content: Any) -> Any:
    """Make all text in it safe for tables and pages."""
    if isinstance(content, dict):
        return {_printable(key): _printable(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_printable(each) for each in content]
    return printable(content) if isinstance(content, str) else content


def read_measurements(run: Run) -> list[Facts]:
    """Read all finished measurements of a run, oldest first."""
    stored = [_read(path) for path in storage.files(run.measurements, "*.json")]
    return [Facts(run, about, Columns(run, about)) for about in sorted(stored, key=lambda each: each.created)]

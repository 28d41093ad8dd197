"""Overview of all suites: accuracy on clean images, under each threat, all threats, and corruptions. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bastion import storage
from bastion.measuring.facts import SHARE, Facts
from bastion.measuring.intervals import Estimate
from bastion.measuring.measurement import NORM_SIGNS, MeasuredThreat
from bastion.measuring.store import Column
from bastion.reporting.axes import varying
from bastion.reporting.tables import ReportedRun, SharedTable, TableRow, corruption_mean, corruptions
from bastion.suite import CORRECT

CLEAN = "clean"
ALL_THREATS = "every threat above"
CORRUPTED = "corruptions"


class Model(NamedTuple):
    """A column of the overview: a run, or one of the models that were measured into it."""

    run: ReportedRun
    key: str
    name: str


class Cell(NamedTuple):
    """Accuracy of one model: right under all of these probes."""

    estimate: Estimate
    under: tuple[str, ...]
    cases: frozenset[str]  # hashes of the probes' settings, to compare them with other models'


@dataclass(frozen=True)
class OverviewRow:
    """A row of the overview. All cells have the same n images."""

    name: str
    n: int
    cells: dict[str, Cell]  # by the key of the model
    threat: MeasuredThreat | None = None
    attacks: int = 0  # at exactly this radius; ensembles count as their members
    population: int | None = None  # if measuring stopped early: the images are the first in random order of this many

    @property
    def same_probes(self) -> bool:
        """Whether all models were measured with the same probes; else the row does not compare them."""
        return len({each.cases for each in self.cells.values()}) <= 1


@dataclass(frozen=True)
class Overview:
    """Overview of one split of a data set."""

    data: str
    split: str
    models: list[Model]
    rows: list[OverviewRow]

    def main_threat(self) -> OverviewRow | None:
        """Return the threat with the most models, then the most images, then the most attacks."""
        attacked = [each for each in self.rows if each.threat]
        return max(attacked, key=lambda each: (len(each.cells), each.n, each.attacks), default=None)


class _Probe(NamedTuple):
    """A probe with a column `correct`, or all corruptions together, of which the mean is taken."""

    model: Model
    facts: Facts
    labels: tuple[str, ...]
    threat: MeasuredThreat | None = None

    def is_within(self, threat: MeasuredThreat) -> bool:
        """Whether the probe's ball is inside the threat's: its adversarial examples then count for the threat."""
        return self.threat is not None and self.threat.norm == threat.norm and self.threat.eps <= threat.eps

    def column(self, n: int) -> Column:
        facts = self.facts.first(n)
        return facts.correct(self.labels[0]) if len(self.labels) == 1 else corruption_mean(facts)


def overviews(tables: Sequence[SharedTable]) -> list[Overview]:
    """Return one overview per data set that several suites were measured on; a single suite has its own table."""
    by_data: dict[str, list[SharedTable]] = {}
    for each in tables:
        if not each.outdated:
            by_data.setdefault(storage.fingerprint(each.about.data), []).append(each)
    several = [group for group in by_data.values() if len({each.about.suite for each in group}) > 1]
    return [made for group in several if (made := _overview(group)).rows]


def _overview(tables: Sequence[SharedTable]) -> Overview:
    measured = [row for table in tables for row in table.rows]
    models = _models(measured)
    probes = [probe for row in measured for probe in _probes(models[_key(row)], row.facts)]
    clean = [each for each in probes if each.threat is None and len(each.labels) == 1]
    attacks = [each for each in probes if each.threat]
    corrupted = [each for each in probes if len(each.labels) > 1]
    threats = sorted(
        {each.threat for each in attacks if each.threat}, key=lambda t: ([*NORM_SIGNS].index(t.norm), t.eps)
    )
    rows = [_row(CLEAN, [clean])]
    rows += [_threat_row(threat, attacks) for threat in threats]
    if len({threat.norm for threat in threats}) > 1:
        rows.append(_row(ALL_THREATS, [[each for each in attacks if each.threat == threat] for threat in threats]))
    most = max((len(each.labels) for each in corrupted), default=0)
    rows.append(_row(CORRUPTED, [[each for each in corrupted if len(each.labels) == most]]))
    about = tables[0].about.data
    return Overview(about["name"], about["split"], list(models.values()), [each for each in rows if each.cells])


def _key(row: TableRow) -> str:
    about = row.facts.about
    return f"{row.run.number}/{about.identity}/{about.weights}"


def _models(rows: Iterable[TableRow]) -> dict[str, Model]:
    """Return the columns by key. A run that holds facts of several models has a column for each."""
    first = {_key(row): row for row in rows}
    runs = Counter(row.run.number for row in first.values())
    names = {
        key: row.run.name if runs[row.run.number] == 1 else f"{row.run.name}, {row.facts.about.model}"
        for key, row in first.items()
    }
    return {key: Model(row.run, key, names[key]) for key, row in first.items()}


def _probes(model: Model, facts: Facts) -> Iterable[_Probe]:
    """Yield the probes on the original images, and all corruptions together, but no unbounded patch attacks."""
    for case in facts.about.cases:
        if case.kind != "probes" or CORRECT not in case.columns or case.data:
            continue
        if case.role == "clean":
            yield _Probe(model, facts, (case.label,))
        elif case.role == "attack" and case.threat and not (case.threat.norm == "linf" and case.threat.eps >= 1):
            yield _Probe(model, facts, (case.label,), case.threat)
    corrupted = tuple(case.label for case in corruptions(facts) if "severity" in varying(case))
    if len(corrupted) > 1:
        yield _Probe(model, facts, corrupted)


def _threat_row(threat: MeasuredThreat, attacks: Sequence[_Probe]) -> OverviewRow:
    exactly = [each for each in attacks if each.threat == threat]
    cases = {case.store: case for each in exactly for case in [each.facts.case(each.labels[0])]}
    count = sum(max(len(case.members), 1) for case in cases.values())
    smaller = [each for each in attacks if each.is_within(threat) and each.threat != threat]
    return _row(str(threat), [exactly], smaller, threat=threat, attacks=count)


def _row(
    name: str,
    needed: Sequence[Sequence[_Probe]],
    further: Sequence[_Probe] = (),
    *,
    threat: MeasuredThreat | None = None,
    attacks: int = 0,
) -> OverviewRow:
    """Return the accuracy under all probes, `further` ones too, of every model with a probe of each needed group.

    On the most images that all of these models have; probes that were measured on fewer are left out.
    """
    everything = [*further, *(each for group in needed for each in group)]
    longest = max(everything, key=lambda each: each.facts.n, default=None)
    population = longest.facts.about.population if longest else None  # stopped early: other images, in random order
    groups = [[each for each in group if each.facts.about.population == population] for group in needed]
    keys = [key for key in _keys(everything) if all(key in _keys(group) for group in groups)]
    n = min(
        (max(each.facts.n for each in group if each.model.key == key) for key in keys for group in groups), default=0
    )
    cells = {}
    for key in keys:
        own = [each for each in everything if each.model.key == key and each.facts.n >= n]
        cells[key] = _cell([each for each in own if each.facts.about.population == population], n)
    return OverviewRow(name, n, cells, threat, attacks, population)


def _keys(probes: Iterable[_Probe]) -> list[str]:
    return list(dict.fromkeys(each.model.key for each in probes))


def _cell(probes: Sequence[_Probe], n: int) -> Cell:
    columns = [each.column(n) for each in probes]
    cases = [each.facts.case(label) for each in probes for label in each.labels]
    under = tuple(dict.fromkeys(case.label for case in cases))
    settings = frozenset(case.store.rpartition("/")[2] for case in cases)
    is_mean = columns[0].dtype != bool  # over corruptions, the same in every suite that has all of them
    column = columns[0] if is_mean else np.logical_and.reduce(columns)
    return Cell(probes[0].facts.first(n).estimate(column, SHARE), under, settings)

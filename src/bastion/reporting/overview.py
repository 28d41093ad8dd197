"""What all suites of a page say together: clean, under each threat, under all of them, under corruptions. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bastion import storage
from bastion.measuring.facts import Facts
from bastion.measuring.intervals import Estimate, bounded_mean
from bastion.measuring.measurement import MeasuredThreat
from bastion.measuring.store import Column
from bastion.reporting.axes import varying
from bastion.reporting.tables import Comparison, ReportedRun, Row, corruption_mean, corruptions
from bastion.suite import CORRECT

CLEAN = "clean"
EVERY = "every threat above"
CORRUPTED = "corruptions"
NORMS = ("linf", "l2", "l1")


class Model(NamedTuple):
    """A column of the overview: a run, or one of the models that were measured into it."""

    run: ReportedRun
    weights: str
    name: str

    @property
    def key(self) -> str:
        return f"{self.run.mark}/{self.weights}"


class Answer(NamedTuple):
    """Of one model: right under all of these probes."""

    estimate: Estimate
    under: tuple[str, ...]
    cases: frozenset[str]  # their settings, by which other models' probes are recognised as the same


@dataclass(frozen=True)
class Question:
    """A row of the overview. All answers are of the same n images."""

    name: str
    n: int
    answers: dict[str, Answer]  # by the key of the model
    threat: MeasuredThreat | None = None
    attacks: int = 0  # that were measured at this very radius; ensembles count by their members

    @property
    def alike(self) -> bool:
        """Were all models asked by the same probes? Else the row does not compare them."""
        return len({each.cases for each in self.answers.values()}) <= 1


@dataclass(frozen=True)
class Overview:
    """Of one split of one data set."""

    data: str
    split: str
    models: list[Model]
    questions: list[Question]

    def best_known(self) -> Question | None:
        """The threat that most models were attacked under, on most images, by most attacks."""
        attacked = [each for each in self.questions if each.threat]
        return max(attacked, key=lambda each: (len(each.answers), each.n, each.attacks), default=None)


class _Probe(NamedTuple):
    """A probe that says what is right, or all corruptions, of which the mean counts."""

    model: Model
    facts: Facts
    labels: tuple[str, ...]
    threat: MeasuredThreat | None = None

    def is_within(self, threat: MeasuredThreat) -> bool:
        """An adversarial example in a smaller ball is one in a larger ball too."""
        return self.threat is not None and self.threat.norm == threat.norm and self.threat.eps <= threat.eps

    def column(self, n: int) -> Column:
        facts = self.facts.first(n)
        return facts.correct(self.labels[0]) if len(self.labels) == 1 else corruption_mean(facts)


def overviews(comparisons: Sequence[Comparison]) -> list[Overview]:
    """One for each data set that several suites were measured on; a single suite has its own table."""
    by_data: dict[str, list[Comparison]] = {}
    for each in comparisons:
        if not each.stale:
            by_data.setdefault(storage.fingerprint(each.about.data), []).append(each)
    several = [group for group in by_data.values() if len({each.about.suite for each in group}) > 1]
    return [made for group in several if (made := _overview(group)).questions]


def _overview(comparisons: Sequence[Comparison]) -> Overview:
    rows = [row for comparison in comparisons for row in comparison.rows]
    models = _models(rows)
    probes = [probe for row in rows for probe in _probes(models[_key(row)], row.facts)]
    clean = [each for each in probes if each.threat is None and len(each.labels) == 1]
    attacks = [each for each in probes if each.threat]
    corrupted = [each for each in probes if len(each.labels) > 1]
    threats = sorted({each.threat for each in attacks if each.threat}, key=lambda t: (NORMS.index(t.norm), t.eps))
    questions = [_question(CLEAN, [clean])]
    questions += [_attacked(threat, attacks) for threat in threats]
    if len({threat.norm for threat in threats}) > 1:
        questions.append(_question(EVERY, [[each for each in attacks if each.threat == threat] for threat in threats]))
    most = max((len(each.labels) for each in corrupted), default=0)
    questions.append(_question(CORRUPTED, [[each for each in corrupted if len(each.labels) == most]]))
    about = comparisons[0].about.data
    return Overview(about["name"], about["split"], list(models.values()), [each for each in questions if each.answers])


def _key(row: Row) -> tuple[int, str]:
    return row.run.mark, row.facts.about.weights


def _models(rows: Iterable[Row]) -> dict[tuple[int, str], Model]:
    """By run and weights. A run into which several models were measured has a column for each."""
    first = {_key(row): row for row in rows}
    marks = [mark for mark, _ in first]
    return {
        key: Model(
            row.run, key[1], row.run.name if marks.count(key[0]) == 1 else f"{row.run.name}, {row.facts.about.model}"
        )
        for key, row in first.items()
    }


def _probes(model: Model, facts: Facts) -> Iterable[_Probe]:
    """Of the images as they are, and all corruptions together. A patch of free pixels is in no ball worth a row."""
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


def _attacked(threat: MeasuredThreat, attacks: Sequence[_Probe]) -> Question:
    exactly = [each for each in attacks if each.threat == threat]
    cases = {case.store: case for each in exactly for case in [each.facts.case(each.labels[0])]}
    count = sum(max(len(case.members), 1) for case in cases.values())
    smaller = [each for each in attacks if each.is_within(threat) and each.threat != threat]
    return _question(str(threat), [exactly], smaller, threat=threat, attacks=count)


def _question(
    name: str,
    needed: Sequence[Sequence[_Probe]],
    further: Sequence[_Probe] = (),
    *,
    threat: MeasuredThreat | None = None,
    attacks: int = 0,
) -> Question:
    """Of every model that has a probe of each group that is needed: right under all of them, and under `further` ones.

    On the most images for which all of these models have that; a probe that was measured on fewer is left out.
    """
    everything = [*further, *(each for group in needed for each in group)]
    longest = max(everything, key=lambda each: each.facts.n, default=None)
    population = longest.facts.about.population if longest else None  # stopped early: other images, in random order
    groups = [[each for each in group if each.facts.about.population == population] for group in needed]
    keys = [key for key in _keys(everything) if all(key in _keys(group) for group in groups)]
    n = min(
        (max(each.facts.n for each in group if each.model.key == key) for key in keys for group in groups), default=0
    )
    answers = {}
    for key in keys:
        own = [each for each in everything if each.model.key == key and each.facts.n >= n]
        answers[key] = _answer([each for each in own if each.facts.about.population == population], n)
    return Question(name, n, answers, threat, attacks)


def _keys(probes: Iterable[_Probe]) -> list[str]:
    return list(dict.fromkeys(each.model.key for each in probes))


def _answer(probes: Sequence[_Probe], n: int) -> Answer:
    columns = [each.column(n) for each in probes]
    cases = [each.facts.case(label) for each in probes for label in each.labels]
    under = tuple(dict.fromkeys(case.label for case in cases))
    asked = frozenset(case.store.rpartition("/")[2] for case in cases)
    if columns[0].dtype != bool:
        return Answer(bounded_mean(columns[0]), under, asked)
    return Answer(probes[0].facts.first(n).estimate(np.logical_and.reduce(columns)), under, asked)

"""Leaderboards: the measured models below a folder by data set, from the summaries of measurements. No torch."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from bastion import storage
from bastion.errors import BastionError
from bastion.measuring.convert import convert
from bastion.measuring.facts import Facts, read_measurements
from bastion.measuring.intervals import Estimate
from bastion.measuring.measurement import MeasuredAggregate, MeasuredCase, Measurement
from bastion.reporting.axes import is_one_corruption, is_variant, without
from bastion.reporting.tables import CORRUPTIONS
from bastion.run import PROVENANCE, Run
from bastion.suite import CORRECT, load_suite

# `errors` are rates of which less is better, `other` is any other aggregate, such as a mean confidence or distance.
Kind = Literal["clean", "attack", "worst", "corruption", "mean", "errors", "other", "study"]
ACCURACIES: tuple[Kind, ...] = ("clean", "attack", "worst", "corruption", "mean")
_ORDER: tuple[Kind, ...] = (*ACCURACIES, "errors", "other", "study")
_ROBUST: tuple[Kind, ...] = ("worst", "attack", "corruption", "mean")  # candidates to sort by, in order of preference
CATEGORIES = ("CNN", "Transformer", "hybrid")  # that families declare
AUTOATTACK = ("apgd-ce", "apgd-t", "fab-t", "square")  # members of its standard version
CORRUPTED = ("cifar10-c", "cifar100-c", "imagenet-c")  # data sets with the published files


@dataclass(frozen=True)
class LeaderboardColumn:
    """A column of the board: one probe with its attack and threat, an aggregate of probes, or a number of a study."""

    key: str
    kind: Kind
    title: str
    about: str  # the threat, or the members of an aggregate
    spec: str = ""  # of the probe, in the format of a suite; for a study, the meaning of the number
    norms: tuple[str, ...] = ()
    eps: float | None = None
    is_share: bool = True  # shown in %
    is_two_phase: bool = False  # an estimate that is not told without its name and interval
    is_autoattack: bool = False  # its standard version, against the model itself on unchanged images
    is_published_corruptions: bool = False  # mean over all types and severities of the published files

    @property
    def name(self) -> str:
        return f"{self.title} ({self.about})" if self.about else self.title

    @property
    def short(self) -> str:
        """Name without the members of an aggregate."""
        return self.name if self.kind == "attack" else self.title


@dataclass
class Entry:
    """A model on a data set."""

    model: str
    weights: str
    folder: Path  # of the run
    identity: str = ""  # of model and data, as its facts have it
    parameters: int | None = None
    architecture: str | None = None
    category: str = ""  # CNN, Transformer or hybrid, where it is known
    doubts: set[str] = field(default_factory=set)
    # By keys of columns; numbers of studies have no n and no interval.
    numbers: dict[str, Estimate] = field(default_factory=dict)
    clean: dict[str, Estimate] = field(default_factory=dict)  # clean accuracy on the same images
    populations: dict[str, int] = field(default_factory=dict)  # if measuring stopped early: n random ones of so many
    published: bool = False  # by others, not measured here

    @property
    def n(self) -> int:
        """Largest number of images of any column."""
        return max(number.n for number in self.numbers.values())

    def value(self, column: LeaderboardColumn) -> float | None:
        """Return its number; None if there is none, or only a range, as of two phases without a sample."""
        number = self.numbers.get(column.key)
        return number.value if number and math.isfinite(number.value) else None


@dataclass(frozen=True)
class Board:
    """Models that were measured on the same images."""

    data: dict[str, str]
    columns: list[LeaderboardColumn]
    entries: list[Entry]  # best first
    classes: int
    preprocessing: str = ""  # of pictures that are not all of one size

    @property
    def title(self) -> str:
        return ", ".join(filter(None, [self.data["name"], f"{self.data['split']} split", self.preprocessing]))

    @property
    def digest(self) -> str:
        return self.data.get("digest", self.data.get("fingerprint", ""))

    @property
    def is_corrupted(self) -> bool:
        """Whether all images are corrupted: `--data cifar10:corruption=fog,severity=3`."""
        return ":corruption=" in self.data["name"]

    @property
    def categories(self) -> list[str]:
        """Categories of its models."""
        return [name for name in CATEGORIES if any(entry.category == name for entry in self.entries)]

    @property
    def sorted_by(self) -> LeaderboardColumn:
        return _sort_column(self.columns, self.entries)

    def columns_of(self, *kinds: Kind) -> list[LeaderboardColumn]:
        return [column for column in self.columns if column.kind in kinds]


@dataclass
class _Draft:
    """A board while measurements are read into it."""

    data: dict[str, str]
    classes: int
    preprocessing: str
    columns: dict[str, LeaderboardColumn] = field(default_factory=dict)
    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)


def read_boards(folder: Path) -> tuple[list[Board], list[str]]:
    """Return the boards, those with most models first, and the reasons why runs were left out."""
    if not storage.is_folder(folder):
        raise BastionError(f"leaderboard: {folder} is not a folder; give one that has runs in it")
    drafts: dict[str, _Draft] = {}
    problems: list[str] = []
    for run in _runs(folder, problems):
        try:
            convert(run)
            for facts in read_measurements(run):
                _add(drafts, facts)
        except BastionError as error:
            problems.append(str(error))
    boards = [_board(draft) for draft in drafts.values() if draft.columns]
    if not boards:
        hint = f"what is there cannot be used: {problems[0]}" if problems else "measure one with `bastion measure`"
        raise BastionError(f"leaderboard: no measured model below {folder}; {hint}")
    return sorted(boards, key=lambda board: (-len(board.entries), board.data["split"] == "train")), problems


def _runs(folder: Path, problems: list[str]) -> Iterator[Run]:
    """Yield the runs in order of path, without nested ones; unreadable folders are added to the problems."""

    def record(error: OSError) -> None:
        problems.append(str(BastionError(f"{error.filename}: cannot be read: {error.strerror}")))

    for path, folders, files in os.walk(folder, onerror=record):
        folders.sort()
        if PROVENANCE in files:
            folders.clear()
            yield Run(Path(path))


def _add(drafts: dict[str, _Draft], facts: Facts) -> None:
    about = facts.about
    card = facts.run.card()
    if card and card.weights != about.weights:
        return  # measured with earlier weights
    columns = _columns(facts)
    if not columns:
        return
    images = about.data.get("digest") or about.data["fingerprint"]
    key = storage.fingerprint([images, about.data["split"], about.preprocessing])
    draft = drafts.setdefault(key, _Draft(about.data, len(about.classes), about.preprocessing))
    new = Entry(about.model, about.weights, facts.run.folder, about.identity)
    entry = draft.entries.setdefault((about.model, about.identity), new)
    entry.parameters = about.parameters or (card.parameters if card else entry.parameters)
    entry.architecture = card.model["name"] if card else entry.architecture
    entry.category = about.category or entry.category
    entry.doubts |= set(about.doubts)
    clean = [number for column, number in columns if column.kind == "clean"]
    for column, number in columns:
        draft.columns.setdefault(column.key, column)
        # Measurements are sorted by age: among those with equally many images the latest counts.
        if number.n >= entry.numbers.get(column.key, number).n:
            entry.numbers[column.key] = number
            entry.clean |= {column.key: clean[0]} if clean else {}
            entry.populations.pop(column.key, None)
            entry.populations |= {column.key: about.population} if about.population else {}


def _columns(facts: Facts) -> list[tuple[LeaderboardColumn, Estimate]]:
    """Return the numbers of a measurement with their columns."""
    about = facts.about
    numbers = about.summary or facts.numbers()  # measured before there were summaries
    cases = {case.label: case for case in about.cases if case.kind == "probes"}
    keys = {label: _case_key(case, about.seed) for label, case in cases.items()}
    corrupted = [label for label, case in cases.items() if case.role == "corruption" and CORRECT in case.columns]
    many = set(corrupted) if len(corrupted) > 1 else set()
    single = [case for label, case in cases.items() if label in numbers and label not in many]
    found = [(_of_case(case, keys[case.label]), numbers[case.label]) for case in single]
    found += [
        (_of_aggregate(name, each, cases, keys, about), numbers[name])
        for name, each in about.aggregates.items()
        if name in numbers and math.isfinite(numbers[name].value) and not _is_part(each, about, cases, many)
    ]
    declared = [set(each.members) for each in about.aggregates.values() if each.kind == "mean" and each.is_accuracy]
    if many and many not in declared:
        mean = _mean([numbers[label] for label in corrupted])
        found.append((_of_corruptions(corrupted, cases, keys, about), mean))
    return found + _of_studies(about)


def _is_part(
    aggregate: MeasuredAggregate, about: Measurement, cases: Mapping[str, MeasuredCase], corrupted: set[str]
) -> bool:
    """Whether the aggregate is of one type of corruption, and another column is of more types."""
    wider = [set(each.members) for each in about.aggregates.values() if each.column == aggregate.column]
    wider += [corrupted] if aggregate.column == CORRECT else []
    return is_one_corruption(aggregate.members, cases) and any(set(aggregate.members) < each for each in wider)


def _case_key(case: MeasuredCase, seed: int) -> str:
    """Return a key that is equal for all models and seeds: of role, probe, threat, attack and variant of the data.

    An older measurement has no key of its own. The name of its store hashes the seed, and also the variant of the data
    and the attack's revision if they are not the defaults; then the name itself is the key.
    """
    plain = storage.fingerprint({case.kind: case.spec, "seed": seed}, digits=16)
    name = case.store.rpartition("/")[2]
    older = storage.fingerprint({case.kind: case.spec}, digits=16) if name == plain else name
    return storage.fingerprint([case.role, case.key or older])


def _of_case(case: MeasuredCase, key: str) -> LeaderboardColumn:
    kind: Kind = case.role if case.role in ("clean", "attack", "corruption") else "mean"
    title = without(case, "eps") if case.threat and is_variant(case, "eps") else case.label
    return LeaderboardColumn(
        key=key,
        kind=kind,
        title=title,
        about=", ".join(filter(None, [str(case.threat) if case.threat else "", case.qualifier])),
        spec=yaml.safe_dump(case.spec, default_flow_style=True, sort_keys=False, width=10**6).strip(),
        norms=(case.threat.norm,) if case.threat else (),
        eps=case.threat.eps if case.threat else None,
        is_two_phase=case.is_two_phase,
        is_autoattack=case.members == AUTOATTACK and case.spec.get("name") == "adversarial" and not case.data,
    )


def _of_aggregate(
    name: str,
    aggregate: MeasuredAggregate,
    cases: Mapping[str, MeasuredCase],
    keys: Mapping[str, str],
    about: Measurement,
) -> LeaderboardColumn:
    members = sorted((keys[label], weight) for label, weight in aggregate.members.items())
    roles = {cases[label].role for label in aggregate.members}
    kind: Kind = "errors" if aggregate.kind == "errors" or aggregate.kind_of_column == "error rate" else "other"
    if aggregate.is_accuracy:
        kind = "worst" if aggregate.kind == "worst" else "corruption" if roles == {"corruption"} else "mean"
    norms = dict.fromkeys(threat.norm for label in aggregate.members if (threat := cases[label].threat))
    return LeaderboardColumn(
        key=storage.fingerprint([aggregate.kind, aggregate.column, members]),
        kind=kind,
        title=name,
        about=_members(list(aggregate.members)),
        norms=tuple(norms),
        is_share=aggregate.bounds is not None,
        is_published_corruptions=kind == "corruption" and _is_published(aggregate.members, cases, about),
    )


def _of_studies(about: Measurement) -> list[tuple[LeaderboardColumn, Estimate]]:
    """Return the single numbers of studies, except parameters, which have a column of their own."""
    found = []
    for case in about.cases:
        key = _case_key(case, about.seed)
        for name in case.columns if case.kind == "studies" else ():
            value = about.scalars.get(f"{case.label}/{name}")
            if value is not None and name != "parameters":
                meaning = case.meanings.get(name, "")
                title = f"{case.label}: {name}"
                own = storage.fingerprint([key, name])
                column = LeaderboardColumn(own, "study", title, "", meaning, is_share=False)
                found.append((column, Estimate(value, math.nan, math.nan, 0)))
    return found


def _of_corruptions(
    labels: Sequence[str], cases: Mapping[str, MeasuredCase], keys: Mapping[str, str], about: Measurement
) -> LeaderboardColumn:
    key = storage.fingerprint(["mean", CORRECT, sorted((keys[label], 1.0) for label in labels)])
    published = _is_published(labels, cases, about)
    return LeaderboardColumn(key, "corruption", CORRUPTIONS, _members(labels), is_published_corruptions=published)


def _is_published(labels: Iterable[str], cases: Mapping[str, MeasuredCase], about: Measurement) -> bool:
    """Whether these are the accuracies on the 15 types and 5 severities of CIFAR-10-C, each once."""
    chosen = [cases[label] for label in labels]
    return (
        about.data["name"] in CORRUPTED
        and all(case.spec == {"name": "accuracy"} for case in chosen)
        and sorted(storage.fingerprint(case.data) for case in chosen) == _published_variants()
    )


@functools.cache
def _published_variants() -> list[str]:
    cases = load_suite("cifar10-c").cases()
    return sorted(storage.fingerprint(case.data) for case in cases if case.role == "corruption")


def _members(labels: Sequence[str]) -> str:
    return f"of {', '.join(labels)}" if len(labels) <= 3 else f"of {len(labels)} probes"


def _mean(numbers: Sequence[Estimate]) -> Estimate:
    """Mean without an interval, which would need the facts."""
    value = sum(number.value for number in numbers) / len(numbers)
    return Estimate(value, math.nan, math.nan, min(number.n for number in numbers))


def _board(draft: _Draft) -> Board:
    columns = sorted(draft.columns.values(), key=lambda each: (_ORDER.index(each.kind), each.norms, each.eps or 0))
    entries = _with_distinct_names(list(draft.entries.values()))
    return ranked(Board(draft.data, _with_distinct_titles(columns), entries, draft.classes, draft.preprocessing))


def ranked(board: Board) -> Board:
    """Return a board sorted with the best models first."""
    chosen = board.sorted_by
    sign = 1 if chosen.kind == "errors" else -1

    def rank(entry: Entry) -> float:
        value = entry.value(chosen)
        return math.inf if value is None else sign * value

    return replace(board, entries=sorted(board.entries, key=rank))


def _sort_column(columns: Sequence[LeaderboardColumn], entries: Sequence[Entry]) -> LeaderboardColumn:
    """Return the robust accuracy that most models have."""
    robust = [column for kind in _ROBUST for column in columns if column.kind == kind]
    return max(robust or columns, key=lambda column: sum(entry.value(column) is not None for entry in entries))


def _with_distinct_titles(columns: Sequence[LeaderboardColumn]) -> list[LeaderboardColumn]:
    """Number the columns that differ but have the same name."""
    seen: dict[str, int] = {}
    result = []
    for column in columns:
        seen[column.name] = seen.get(column.name, 0) + 1
        number = f" ({seen[column.name]})" if seen[column.name] > 1 else ""
        result.append(LeaderboardColumn(**vars(column) | {"title": f"{column.title}{number}"}))
    return result


def _with_distinct_names(entries: list[Entry]) -> list[Entry]:
    """Append a hash of the weights to names that several models have, and of the code if the weights are equal too."""
    names = Counter(entry.model for entry in entries)
    weights = Counter((entry.model, entry.weights) for entry in entries)
    for entry in entries:
        equal = weights[entry.model, entry.weights] > 1
        if names[entry.model] > 1:
            entry.model = f"{entry.model} ({entry.weights[:8]}{f', code {entry.identity}' if equal else ''})"
    return entries


def cell(entry: Entry, column: LeaderboardColumn) -> dict[str, Any]:
    """Return a number as text for files; empty strings where there is none."""
    number = entry.numbers.get(column.key)
    parts = {"value": number.value, "low": number.low, "high": number.high} if number else {}
    texts = {name: f"{part:.6g}" if math.isfinite(part) else "" for name, part in parts.items()}
    images = {"n": (number.n or "") if number else "", "population": entry.populations.get(column.key, "")}
    return {"value": "", "low": "", "high": "", **texts, **images}

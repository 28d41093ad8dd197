"""Title and summary sentence of a report. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bastion.measuring.measurement import TWO_PHASE, MeasuredCase
from bastion.reporting.overview import CLEAN, Overview
from bastion.reporting.tables import ReportedRun, SharedTable, TableRow, corruptions
from bastion.reporting.wording import interval, listed, percent

NAMES = 4  # most runs that the title names; more are counted


def page_title(runs: Sequence[ReportedRun], tables: Sequence[SharedTable]) -> str:
    """Return the models and data sets as a title."""
    names = [run.name for run in runs]
    who = listed(names) if len(names) <= NAMES else f"{len(names)} models"
    data = list(dict.fromkeys(each.about.data["name"] for each in tables))
    return f"{who} on {listed(data)}" if data else who


def summary(tables: Sequence[SharedTable], overview: Sequence[Overview] = ()) -> str:
    """Summarise the first overview, else the first table of accuracies, in a sentence."""
    if overview and (sentence := _overview_summary(overview[0])):
        return sentence + "".join(dict.fromkeys(_doubt(each) for each in tables if not each.outdated))
    first = next((table for table in tables if table.columns), None)
    if first is None:
        measured = any(row.facts.accuracies() for table in tables for row in table.rows)
        return "Accuracies by variant are below." if measured else "No accuracy has been measured yet."
    texts = [_accuracies(row, spelled_out=position == 0) for position, row in enumerate(first.rows)]
    images = f"{first.n} images of {first.about.data['name']} ({first.about.data['split']})"
    return f"{'; '.join(texts)}. Measured on {images}.{_doubt(first)}"


def _overview_summary(overview: Overview) -> str:
    """Return clean accuracy, and accuracy under all attacks of the main threat."""
    attacked = overview.main_threat()
    clean = next((each for each in overview.rows if each.name == CLEAN), None)
    if attacked is None or clean is None:
        return ""
    sentences: list[str] = []
    for model in overview.models:
        numbers = [row.cells.get(model.key) for row in (clean, attacked)]
        texts = [f"{percent(each.estimate.value)}\u00a0%" for each in numbers if each]
        if len(texts) < 2:
            continue
        words = ("right on clean images", f"under attack ({attacked.name})".replace(" ≤ ", "\u00a0≤\u00a0"))
        parts = ", ".join(map(" ".join, zip(texts, words, strict=True))) if not sentences else " and ".join(texts)
        sentences.append(f"{model.name}: {parts}")
    images = clean.n if clean.n == attacked.n else f"{clean.n} and {attacked.n}"
    note = "" if attacked.same_probes else " Their attacks differ, so the numbers do not compare them."
    measured = f"Measured on {images} images of {overview.data} ({overview.split})."
    return f"{'; '.join(sentences)}.{note} {measured}" if sentences else ""


def _doubt(table: SharedTable) -> str:
    """Return a sentence on the runs with warnings; empty if there are none."""
    names = [row.name for row in table.with_warnings]
    return f" Sanity checks warn about the numbers of {', '.join(names)}: see below." if names else ""


def _accuracies(row: TableRow, *, spelled_out: bool) -> str:
    """`robust: 47.0 % right on clean images, 26.5 % under attack (ℓ2 ≤ 1)`, or short `standard: 55.0 % and 0.0 %`."""
    clean = [case.label for case in row.facts.with_role("clean") if case.label in row.accuracies]
    others = [case for case in row.facts.about.cases if case.label in row.accuracies and case.label not in clean[:1]]
    worst = [name for name, each in row.facts.about.aggregates.items() if each.kind == "worst"]
    parts = [(label, "right on clean images") for label in clean[:1]]
    parts += [(label, _setting(others)) for label in worst[:1]]
    parts += [] if worst else [(case.label, _setting([case])) for case in others[:1]]
    if len(parts) == len(clean[:1]) and corruptions(row.facts):
        parts += [(label, "under corruptions, on average") for label in row.accuracies if label not in clean][:1]
    numbers = [_number(row, label) for label, _ in parts]
    if not spelled_out:
        return f"{row.name}: {' and '.join(numbers)}"
    return f"{row.name}: " + ", ".join(f"{number} {words}" for number, (_, words) in zip(numbers, parts, strict=True))


def _number(row: TableRow, label: str) -> str:
    """Return an accuracy as text; a two-phase estimate with its name and interval."""
    accuracy = row.accuracies[label]
    text = f"{percent(accuracy.value)}\u00a0%"
    if label not in row.facts.two_phases():
        return text
    if not math.isfinite(accuracy.value):  # nobody was sampled
        return f"{interval(accuracy)}\u00a0% ({TWO_PHASE})"
    return f"{text} ({TWO_PHASE}, {interval(accuracy)})"


def _setting(cases: Sequence[MeasuredCase]) -> str:
    """Describe the probes that the worst case is over."""
    if not all(case.role == "attack" for case in cases):
        return "in the worst case"
    if len(cases) > 1:
        return f"under the worst of {len(cases)} attacks"
    threat = cases[0].threat if cases else None
    return f"under attack ({threat})".replace(" ≤ ", "\u00a0≤\u00a0") if threat else "under attack"

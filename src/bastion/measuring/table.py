"""Formats a measurement as text for a terminal and as HTML for a notebook. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from bastion.measuring.intervals import Estimate
from bastion.measuring.measurement import NORM_SIGNS, PHASES, MeasuredThreat, adaptation, mixture, unreadable
from bastion.measuring.sampling import TwoPhase, sample_size

if TYPE_CHECKING:
    from bastion.measuring.facts import Facts

WIDTH = 0.005  # of a two-phase estimate: half a point


def table(facts: Facts) -> str:
    """Return accuracy with its 95 % interval per probe and aggregate, the paper's numbers, and warnings, as text.

    Probes with two axes are shown as a grid at the end, without intervals.
    """
    grid = facts.grids()
    rows: list[tuple[str, str, str]] = []
    for label, accuracy in facts.accuracies().items():
        if any(label in each.labels for each in grid):
            continue
        rows.append((label, _threat(facts, label), _percentages(accuracy) + _printed(facts, label)))
        if label in facts.labels:
            rows += [(f"  {stage}", "", _percentages(after)) for stage, after in facts.stages(label).items()]
    rows += [(name, "", _summed(facts, name, each) + _printed(facts, name)) for name, each in facts.errors().items()]
    for label, phased in facts.two_phases().items():
        rows += [
            (label, _threat(facts, label), _percentages(phased.population)),
            ("", "", _phases(facts, label, phased)),
        ]
    rows += _distances(facts)
    rows += _analyses(facts)
    rows += [(name, "", text) for name, text in _scalars(facts).items()]
    about = facts.about
    head = f"{about.model} on {about.data['name']} ({about.data['split']}), suite {about.suite}"
    below = [line for each in grid for line in each.lines()]
    return "\n".join([head, *_aligned(rows), *below, *_notes(facts)])


def _summed(facts: Facts, name: str, e: Estimate) -> str:
    """Format shares as percentages, others as they are, such as distances."""
    if facts.about.aggregates[name].bounds is not None:
        return _percentages(e)
    return f"{e.value:.4g}  [{e.low:.4g}, {e.high:.4g}]  n = {e.n}"


def _phases(facts: Facts, label: str, phased: TwoPhase) -> str:
    survived, sampled, lost = (int(facts.columns[f"{label}/{name}"].sum()) for name in PHASES)
    return (
        f"two-phase: {sampled} of {survived} survivors sampled, {lost} lost; on these {phased.n} images "
        f"{100 * phased.low:.2f} to {100 * phased.high:.2f} %"
    )


def _threat(facts: Facts, label: str) -> str:
    case = facts.case(label) if label in facts.labels else None
    return str(case.threat) if case and case.threat else ""


def _printed(facts: Facts, label: str) -> str:
    numbers = facts.about.published.numbers if facts.about.published else {}
    return f"  paper {100 * numbers[label]:.1f}" if label in numbers else ""


def _distances(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Yield rows for probes with minimal distances instead of an accuracy."""
    for case in facts.about.cases:
        if column := case.minimal_distance:
            distance = facts.columns[f"{case.label}/{column}"]
            rest = int(np.isinf(distance).sum())
            text = f"median distance {np.median(distance):.4g}, {rest} not fooled  n = {len(distance)}"
            norm = str(case.spec.get("norm", ""))
            yield case.label, NORM_SIGNS.get(norm, norm), text
            for radius, accuracy in facts.curve(case.label, case.radii).items():
                yield "  at", str(MeasuredThreat(norm=norm, eps=radius)), _percentages(accuracy)


def _analyses(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Yield mean and standard deviation of analysis columns that are real-valued and in no aggregate."""
    labels = {case.label for case in facts.with_role("analysis")}
    summed = {f"{label}/{each.column}" for each in facts.about.aggregates.values() for label in each.members}
    for name, e in facts.estimates().items():
        label, _, column = name.rpartition("/")
        values = facts.columns[name]
        if label in labels and name not in summed and values.dtype != bool and e.n:
            spread = float(np.std(values[np.isfinite(values)], ddof=min(1, e.n - 1)))
            text = f"mean {e.value:.4g}  [{e.low:.4g}, {e.high:.4g}]  std {spread:.3g}  n = {e.n}"
            yield f"{label}: {column}", "", text


def _scalars(facts: Facts) -> dict[str, str]:
    finite = {name: value for name, value in facts.scalars().items() if math.isfinite(value)}
    return {name.replace("/", ": "): f"{value:,.7g}" for name, value in finite.items()}


def _notes(facts: Facts) -> list[str]:
    about = facts.about
    texts = [
        stopped(facts),
        *left_out(facts),
        *small_samples(facts),
        *about.notes,
        unreadable(about),
        mixture(about),
        adaptation(about),
    ]
    notes = [f"note: {text}" for text in texts if text]
    if facts.about.published:
        notes.append(f"paper: {facts.about.published}")
    if facts.checks and not facts.warnings():
        return [f"sanity checks: {facts.checks}, no warning", *notes]
    return [*map(str, facts.warnings()), *notes]


def left_out(facts: Facts) -> list[str]:
    """Return a note for each aggregate that leaves out examples with a non-finite value."""
    columns = {name: facts.aggregate_column(name) for name in facts.about.aggregates}
    counts = {name: int((~np.isfinite(column)).sum()) for name, column in columns.items()}
    return [
        f"{name}: without {count} of {facts.n} examples, whose '{facts.about.aggregates[name].column}' is not finite"
        for name, count in counts.items()
        if count
    ]


def small_samples(facts: Facts) -> Iterator[str]:
    """Yield a note for each two-phase estimate whose sample of survivors leaves it uncertain by more than WIDTH."""
    for label, phased in facts.two_phases().items():
        width = phased.high - phased.low
        if width > WIDTH:
            survived, sampled, lost = (int(facts.columns[f"{label}/{name}"].sum()) for name in PHASES)
            needed = sample_size(survived, phased.n, width=WIDTH, lost_share=lost / sampled if sampled else 0.0)
            yield (
                f"{label}: {100 * width:.2f} points wide because a sample of the survivors was attacked; a share of "
                f"{math.ceil(100 * needed / survived) / 100:g} of them makes it {100 * WIDTH:g} points"
            )


def stopped(facts: Facts) -> str:
    """Return a note on what the intervals of a measurement that stopped early are about; empty if it did not."""
    if facts.about.population is None:
        return ""
    return (
        f"stopped after {facts.n} of {facts.about.population} examples in random order; intervals of accuracies, "
        "error rates and other shares are about all of them, and valid at any stopping time; those of two-phase "
        "estimates and other numbers are ordinary intervals"
    )


def until_the_end(facts: Facts, until: float) -> str:
    """Return a note if all examples were measured and an interval is still wider than `until`; else empty."""
    aggregates = facts.about.aggregates
    tested = [e for name, e in facts.accuracies().items() if name not in aggregates or aggregates[name].kind == "worst"]
    widest = max((e.high - e.low for e in tested), default=0.0)
    if facts.about.population is not None or widest <= until:
        return ""
    return (
        f"all {facts.n} examples are measured; intervals are now about the image distribution, and wider than {until:g}"
    )


def numbers(facts: Facts) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, threat, value and interval of each number; the name says if it is a two-phase estimate."""
    qualifiers = {case.label: f" ({case.qualifier})" for case in facts.about.cases if case.qualifier}
    for label, e in facts.numbers().items():
        aggregate = facts.about.aggregates.get(label)
        value = f"{100 * e.value:.2f} %" if math.isfinite(e.value) else ""  # a range alone
        interval = f"[{100 * e.low:.2f}, {100 * e.high:.2f}]"
        if aggregate and aggregate.bounds is None:  # no share, such as a distance
            value, interval = f"{e.value:.4g}", f"[{e.low:.4g}, {e.high:.4g}]"
        yield f"{label}{qualifiers.get(label, '')}", _threat(facts, label), value, interval


def html(facts: Facts) -> str:
    """Return an HTML table of accuracies with their intervals, then warnings."""
    rows = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>" for texts in numbers(facts))
    head = f"{facts.about.model} on {facts.about.data['name']}, n = {facts.n}"
    below = "".join(f"<p>{escape(str(each))}</p>" for each in facts.warnings())
    return f"<table><caption>{escape(head)}</caption>{rows}</table>{below}"


def _aligned(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Align labels, threats and numbers in columns."""
    width = max([16, *(len(label) for label, _, _ in rows)])
    middle = max([0, *(len(threat) for _, threat, _ in rows)])
    return [f"{label:<{width}} {threat:<{middle}}{' ' if middle else ''}{text}" for label, threat, text in rows]


def _percentages(e: Estimate) -> str:
    value = f"{100 * e.value:6.2f} %" if math.isfinite(e.value) else " " * 8  # a range alone
    return f"{value}  [{100 * e.low:5.2f}, {100 * e.high:5.2f}]  n = {e.n}"

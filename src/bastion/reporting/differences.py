"""Paired differences of accuracy between runs. No torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from bastion.measuring.intervals import Estimate
from bastion.measuring.paired import paired_difference
from bastion.reporting.tables import Comparison, Row, per_example

PAIRS = 6  # all pairs of four runs; of more runs each is compared with the first only


@dataclass(frozen=True)
class Difference:
    """`other` minus `one` by label of the headline, without two-phase estimates, which have no paired difference."""

    one: Row
    other: Row
    by_label: dict[str, Estimate]


def differences(comparison: Comparison) -> list[Difference]:
    labels = [label for label in comparison.columns if label not in comparison.phased]
    pairs = list(itertools.combinations(comparison.rows, 2)) if labels else []
    if len(pairs) > PAIRS:
        pairs = [(comparison.rows[0], other) for other in comparison.rows[1:]]
    return [Difference(one, other, {label: _difference(one, other, label) for label in labels}) for one, other in pairs]


def _difference(one: Row, other: Row, label: str) -> Estimate:
    a, b = per_example(one.facts, label), per_example(other.facts, label)
    return paired_difference(a, b, one.facts.about.population)  # the same for all rows of a table


def is_significant(difference: Estimate) -> bool:
    """Whether the interval excludes zero."""
    return difference.low > 0 or difference.high < 0

"""Paired differences of accuracy between runs, with McNemar's test and the images that changed. No torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from bastion.measuring.compare import example_index
from bastion.measuring.facts import SHARE
from bastion.measuring.intervals import Estimate
from bastion.measuring.paired import Paired, paired
from bastion.reporting.tables import SharedTable, TableRow, per_example

PAIRS = 6  # all pairs of four runs; of more runs each is compared with the first only
SHOWN = 20  # images of a list


class Changed(NamedTuple):
    """Images that only one of two runs gets right, as text: `3, 17, 25 …`."""

    label: str
    gained: str
    lost: str


@dataclass(frozen=True)
class Difference:
    """`other` less `one` by label of the headline, without two-phase estimates, which have no paired difference."""

    one: TableRow
    other: TableRow
    by_label: dict[str, Paired]

    @property
    def changed(self) -> list[Changed]:
        """Images that changed, by probe or worst case; a mean over probes has no such list."""
        found = []
        for label, each in self.by_label.items():
            if per_example(self.one.facts, label).dtype == bool and (each.gained | each.lost).any():
                index = example_index(self.one.facts, label)
                found.append(Changed(label, *(_listed(index[rows].tolist()) for rows in (each.gained, each.lost))))
        return found


def _listed(images: list[int]) -> str:
    return ", ".join(map(str, images[:SHOWN])) + (" …" if len(images) > SHOWN else "") or "none"


def differences(table: SharedTable) -> list[Difference]:
    labels = [label for label in table.columns if label not in table.phased]
    pairs = list(itertools.combinations(table.rows, 2)) if labels else []
    if len(pairs) > PAIRS:
        pairs = [(table.rows[0], other) for other in table.rows[1:]]
    return [Difference(one, other, {label: _paired(one, other, label) for label in labels}) for one, other in pairs]


def _paired(one: TableRow, other: TableRow, label: str) -> Paired:
    a, b = per_example(one.facts, label), per_example(other.facts, label)
    about = one.facts.about  # population and aggregates are the same for all rows of a table
    return paired(a, b, about.population, about.bounds(label) or SHARE)


def is_significant(difference: Estimate) -> bool:
    """Whether the interval excludes zero."""
    return difference.low > 0 or difference.high < 0

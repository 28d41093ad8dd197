"""Tables of accuracies of probes with two axes, such as type and severity of a corruption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bastion.measuring.intervals import Estimate
from bastion.suite import written

if TYPE_CHECKING:
    from bastion.measuring.measurement import MeasuredCase

Key = tuple[str, str]  # values of the two axes


@dataclass(frozen=True)
class AccuracyGrid:
    """One line for each value of the first axis, one column for each of the second."""

    probe: str
    axes: Key
    cells: dict[Key, str]  # labels of cases
    accuracies: Mapping[str, Estimate]

    @property
    def labels(self) -> set[str]:
        return set(self.cells.values())

    def lines(self) -> list[str]:
        """Return lines of text, in percent."""
        rows, columns = (list(dict.fromkeys(key[axis] for key in self.cells)) for axis in (0, 1))
        titles = [f"{self.axes[0]}={value}" for value in rows]
        head = [f"{self.axes[1]}={value}" for value in columns]
        width = max(16, *map(len, titles))
        lines = [f"{self.probe + ', %':<{width}} {' '.join(head)}"]
        for row, title in zip(rows, titles, strict=True):
            texts = [f"{self._percent((row, column)):>{len(each)}}" for column, each in zip(columns, head, strict=True)]
            lines.append(f"{title:<{width}} {' '.join(texts)}")
        return lines

    def _percent(self, key: Key) -> str:
        return f"{100 * self.accuracies[self.cells[key]].value:.1f}" if key in self.cells else ""


def grids(cases: Sequence[MeasuredCase], accuracies: Mapping[str, Estimate]) -> list[AccuracyGrid]:
    """Return a grid for every probe with two axes of several values each."""
    made: dict[str, AccuracyGrid] = {}
    for case in cases:
        if len(case.at) == 2 and case.label in accuracies:
            (first, second), (row, column) = case.at, map(written, case.at.values())
            probe = case.label.removesuffix(f" {first}={row} {second}={column}")  # else an axis has one value
            if probe != case.label:
                grid = made.setdefault(probe, AccuracyGrid(probe, (first, second), {}, accuracies))
                grid.cells[row, column] = case.label
    return list(made.values())

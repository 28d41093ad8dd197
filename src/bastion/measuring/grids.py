"""Probes that vary along two axes, such as type and severity of a corruption, as one grid of numbers in text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bastion.measuring.intervals import Estimate
from bastion.suite import written

if TYPE_CHECKING:
    from bastion.measuring.facts import MeasuredCase


def grids(cases: Sequence[MeasuredCase], accuracies: Mapping[str, Estimate]) -> dict[str, list[str]]:
    """By probe, the lines of its grid: one for each value of the first axis, one column for each of the second."""
    made = {}
    for base in dict.fromkeys(_base(case) for case in cases if _is_cell(case, accuracies)):
        own = [case for case in cases if _is_cell(case, accuracies) and _base(case) == base]
        (rows, columns), cells = own[0].at, {tuple(map(written, case.at.values())): case.label for case in own}
        across, down = list(dict.fromkeys(key[1] for key in cells)), list(dict.fromkeys(key[0] for key in cells))
        if len(across) < 2 or len(down) < 2 or len(cells) < len(own):
            continue
        width = max(16, *(len(f"{rows}={value}") for value in down))
        head = [f"{columns}={value}" for value in across]
        lines = [f"{base + ', %':<{width}} {' '.join(head)}"]
        for value in down:
            labels = [cells.get((value, each)) for each in across]
            numbers = [f"{100 * accuracies[label].value:.1f}" if label else "" for label in labels]
            texts = [f"{number:>{len(title)}}" for number, title in zip(numbers, head, strict=True)]
            lines.append(f"{f'{rows}={value}':<{width}} {' '.join(texts)}")
        made[base] = lines
    return made


def in_grid(case: MeasuredCase, made: Mapping[str, list[str]]) -> bool:
    return len(case.at) == 2 and _base(case) in made


def _is_cell(case: MeasuredCase, accuracies: Mapping[str, Estimate]) -> bool:
    return len(case.at) == 2 and case.label in accuracies


def _base(case: MeasuredCase) -> str:
    """The label without the values of the axes."""
    said = " ".join(f"{name}={written(value)}" for name, value in case.at.items())
    return case.label.removesuffix(f" {said}")

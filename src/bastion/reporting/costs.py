"""Table of the cost of models and attacks. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from bastion.reporting.tables import SharedTable, TableRow
from bastion.reporting.wording import count

# Numbers of the study `complexity`: their text and format.
_SCALARS: dict[str, tuple[str, Callable[[float], str]]] = {
    "parameters": ("parameters", count),
    "macs": ("multiply-accumulates per image", count),
    "throughput": ("images per second, forward, as timed when measured", "{:,.4g}".format),
    "attack_pass": ("time of a pass to the image and back, in forward passes", "{:.2f}".format),
    "training_pass": ("time of a pass to the weights and back, in forward passes", "{:.2f}".format),
    "memory": ("peak memory of such a pass, bytes per image", count),
}


@dataclass(frozen=True)
class CostTable:
    """Rows with one cell per run."""

    models: list[tuple[str, list[str]]]
    attacks: list[tuple[str, list[tuple[str, str, str]]]]  # forward and backward passes and seconds per image

    def __bool__(self) -> bool:
        return bool(self.models or self.attacks)


def cost_table(table: SharedTable) -> CostTable:
    first = table.rows[0].facts
    labels = [case.label for case in first.about.cases if {"forwards", "backwards"} <= {*case.columns}]
    models = [(text, [_scalar(row, name) for row in table.rows]) for name, (text, _) in _SCALARS.items()]
    models.append(("seconds of measuring, of all workers together", [_total_seconds(row) for row in table.rows]))
    return CostTable(
        models=[(text, cells) for text, cells in models if any(cells)],
        attacks=[(label, [_per_image(row, label) for row in table.rows]) for label in labels],
    )


def _scalar(row: TableRow, name: str) -> str:
    """Return a number of the study `complexity`; parameters and MACs also as counted by any measurement."""
    for columns in row.facts.studies().values():
        if "macs" in columns and name in columns and math.isfinite(columns[name].item()):
            return _SCALARS[name][1](columns[name].item())
    counted = {"parameters": row.facts.about.parameters, "macs": row.facts.about.macs}.get(name)
    return "" if counted is None else count(counted)


def _total_seconds(row: TableRow) -> str:
    """Return the time that all probes and studies take; empty if some were stored before and not timed."""
    about = row.facts.about
    seconds = [about.seconds.get(case.label, math.nan) * case.n for case in about.cases]
    return _seconds(sum(seconds)) if math.isfinite(sum(seconds)) else ""


def _per_image(row: TableRow, label: str) -> tuple[str, str, str]:
    forwards, backwards = (float(row.facts.columns[f"{label}/{name}"].mean()) for name in ("forwards", "backwards"))
    seconds = row.facts.about.seconds.get(label)
    return f"{forwards:,.0f}", f"{backwards:,.0f}", "" if seconds is None else f"{_seconds(seconds)}\u00a0s"


def _seconds(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"

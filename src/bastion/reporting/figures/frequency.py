"""Accuracy over the cut-off of a filter, on images and under perturbations."""

from __future__ import annotations

from bastion.measuring.measurement import MeasuredCase
from bastion.reporting.figures import Figure, by_case, fact, figures
from bastion.reporting.plots import curve_panel
from bastion.reporting.robustness_curves import CurveChart, Line
from bastion.reporting.tables import SharedTable

# By what is filtered: the columns, and what their charts are called.
FILTERED = {
    "images": {"low_pass": "low-passed", "high_pass": "high-passed"},
    "perturbations": {"attack_low_pass": "δ low-passed", "attack_high_pass": "δ high-passed"},
}


@figures.register("frequency")
@by_case
def frequency(table: SharedTable, case: MeasuredCase) -> list[Figure]:
    return [_figure(table, case, what) for what in FILTERED]


def _figure(table: SharedTable, case: MeasuredCase, what: str) -> Figure:
    cutoffs = [float(each) for each in case.spec["cutoffs"]]
    panels = []
    for column, title in FILTERED[what].items():
        lines = [
            Line(row.run.number, cutoffs, [row.facts.estimate(right) for right in seen.T])
            for row in table.rows
            for seen in [fact(row, case, column)]
        ]
        chart = CurveChart(title, "", False, lines, "cut-off (cycles per pixel)")
        panels.append(curve_panel(chart, table.chance))
    caption = (
        f"Only frequencies up to the cut-off, or only those above it, are left of the {what}. "
        "Bands are 95 % intervals, the dotted line is chance."
    )
    where = "on filtered images" if what == "images" else f"under filtered perturbations, {case.threat}"
    return Figure(f"Accuracy {where} ({case.label})", panels, caption)

"""Rademacher complexity over the dimension, between the bounds of Lemma 1 (Eq. 4 of Tang et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from bastion.measuring.measurement import MeasuredCase
from bastion.measuring.store import Column
from bastion.reporting import svg
from bastion.reporting.figures import Figure, figures
from bastion.reporting.tables import SharedTable
from bastion.suite import written

NORMS = ("1", "2", "∞")
CAPTION = (
    "Empirical Rademacher complexity of linear classifiers with ‖θ‖_p ≤ 1 on {n} images of the data, made smaller for "
    "smaller dimensions d: clean (dashed), and in the worst case of ℓ∞ attacks of ε = {eps} (solid), between both "
    "bounds of Lemma 1 (band). It is about the data alone: all models share it."
)


@figures.register("rademacher")
def rademacher(table: SharedTable, cases: Sequence[MeasuredCase], key: str) -> list[Figure]:
    """A figure for each radius."""
    return [_of_case(table, case, f"{key}-{number}") for number, case in enumerate(cases)]


def _of_case(table: SharedTable, case: MeasuredCase, key: str) -> Figure:
    columns = table.rows[0].facts.columns
    facts = {name: columns[f"{case.label}/{name}"] for name in case.columns}
    n = int(facts["n"][0])
    eps = float((facts["upper"] - facts["clean"])[0, 0]) * n**0.5  # at p = 1 the bound adds ε/√n
    panels = [_panel(facts, number, f"{key}-{number}") for number in range(len(NORMS))]
    caption = CAPTION.format(n=n, eps=written(eps))
    return Figure(f"Rademacher complexity of linear classifiers, ε = {written(eps)}", panels, caption, legend=False)


def _panel(facts: dict[str, Column], number: int, key: str) -> Markup:
    dimension = facts["dimension"]
    with svg.figure(360, 250) as drawn:
        axes = svg.axes(drawn, left=46, right=10, top=30, bottom=44)
        axes.set_title(f"p = {NORMS[number]}: complexity", loc="left", fontsize=13)
        paint = svg.colour(0)
        low, high = (facts[name][:, number] for name in ("lower", "upper"))
        axes.fill_between(dimension, low, high, color=paint, alpha=0.15, linewidth=0)
        for bound in (low, high):
            axes.plot(dimension, bound, color=paint, linewidth=0.8, alpha=0.6)
        axes.plot(dimension, facts["clean"][:, number], color=svg.MUTED, linewidth=1.6, linestyle=(0, (4, 3)))
        axes.errorbar(
            dimension,
            facts["adversarial"][:, number],
            1.96 * facts["adversarial_error"][:, number],
            color=paint,
            marker="o",
            markersize=6,
            linewidth=2,
        )
        axes.set(xscale="log", yscale="log")
        svg.decades(axes.yaxis)
        axes.set_xticks(dimension, [f"{int(each):,}" for each in dimension])
        axes.minorticks_off()
        axes.set_xlabel("dimension d")
        axes.grid(axis="y")
        exponent = (
            np.polyfit(np.log(dimension), np.log(facts["adversarial"][:, number]), 1)[0] if len(dimension) > 1 else 0
        )
        title = f"p = {NORMS[number]}: complexity over the dimension, growing about as d to the power {exponent:.2f}"
        return svg.inline(drawn, key, title)

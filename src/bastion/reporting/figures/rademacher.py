"""Rademacher complexity over the dimension, between the bounds of Lemma 1 (Eq. 4 of Tang et al. 2022)."""

from __future__ import annotations

import numpy as np
from markupsafe import Markup

from bastion.measuring.measurement import MeasuredCase
from bastion.measuring.store import Column
from bastion.reporting import svg
from bastion.reporting.figures import Figure, by_case, fact, figures
from bastion.reporting.tables import SharedTable
from bastion.suite import written

NORMS = ("1", "2", "∞")
CAPTION = (
    "Empirical Rademacher complexity of linear classifiers with ‖θ‖_p ≤ 1 on {n} images of the data, made smaller for "
    "smaller dimensions d: clean (dashed), and in the worst case of ℓ∞ attacks of ε = {eps} (solid), between both "
    "bounds of Lemma 1 (band). It is about the data alone: all models share it."
)


@figures.register("rademacher")
@by_case
def rademacher(table: SharedTable, case: MeasuredCase) -> list[Figure]:
    facts = {name: fact(table.rows[0], case, name) for name in case.columns}
    n = int(facts["n"][0])
    eps = float((facts["upper"] - facts["clean"])[0, 0]) * n**0.5  # at p = 1 the bound adds ε/√n
    panels = [_panel(facts, number) for number in range(len(NORMS))]
    caption = CAPTION.format(n=n, eps=written(eps))
    return [Figure(f"Rademacher complexity of linear classifiers, ε = {written(eps)}", panels, caption, legend=False)]


def _panel(facts: dict[str, Column], number: int) -> Markup:
    dimension, adversarial = facts["dimension"], facts["adversarial"][:, number]
    with svg.panel(360, 250, left=46, right=10) as axes:
        axes.set_title(f"p = {NORMS[number]}: complexity")
        paint = svg.colour(0)
        low, high = (facts[name][:, number] for name in ("lower", "upper"))
        axes.fill_between(dimension, low, high, color=paint, alpha=0.15, linewidth=0)
        for bound in (low, high):
            axes.plot(dimension, bound, color=paint, linewidth=0.8, alpha=0.6)
        axes.plot(dimension, facts["clean"][:, number], color=svg.MUTED, linewidth=1.6, linestyle=(0, (4, 3)))
        error = 1.96 * facts["adversarial_error"][:, number]
        axes.errorbar(dimension, adversarial, error, color=paint, marker="o", markersize=6, linewidth=2)
        axes.set(xscale="log", yscale="log", xlabel="dimension d")
        svg.decades(axes.yaxis)
        axes.set_xticks(dimension, [f"{int(each):,}" for each in dimension])
        axes.minorticks_off()
        exponent = np.polyfit(np.log(dimension), np.log(adversarial), 1)[0] if len(dimension) > 1 else 0
        title = f"p = {NORMS[number]}: complexity over the dimension, growing about as d to the power {exponent:.2f}"
        return svg.inline(axes, title)

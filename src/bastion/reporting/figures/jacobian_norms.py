"""The bound of Table 2 of Wang and Ruan 2022, and how loose it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bastion.measuring.facts import MeasuredCase
from bastion.reporting.figures import Figure, Table, figures
from bastion.reporting.tables import Comparison, Row
from bastion.reporting.wording import quantity

COLUMNS = {
    "table_2": "Table 2: √(max ‖J‖₁ · max ‖J‖∞), mean",
    "exact": "largest singular value, mean",
    "looseness": "bound over exact, mean",
    "by_block": "√(‖J‖₁‖J‖∞) over σ of one block, median",
}
CAPTION = (
    "Of every block with its skip connection, for each image, then over the images. Table 2 takes the largest ‖J‖₁ "
    "and the largest ‖J‖∞, which may be of different blocks; the last column is of one block at a time."
)


@figures.register("jacobian-norms")
def jacobian_norms(comparison: Comparison, cases: Sequence[MeasuredCase], key: str) -> list[Figure]:
    return [
        Figure(
            f"{case.label}: the bound without singular values",
            caption=CAPTION,
            table=Table(["run", *COLUMNS.values()], [(row.name, _cells(row, case)) for row in comparison.rows]),
        )
        for case in cases
    ]


def _cells(row: Row, case: MeasuredCase) -> list[str]:
    facts = {name: row.facts.columns[f"{case.label}/{name}"].astype(np.float64) for name in case.columns}
    exact = np.nanmax(facts["sigma"], axis=1)
    by_block = np.sqrt(facts["norm_1"] * facts["norm_inf"]) / facts["sigma"]
    cells = []
    for column in (facts["table_2"], exact, facts["looseness"]):
        found = row.facts.estimate(column)
        cells.append(f"{quantity(found.value)} [{quantity(found.low)}, {quantity(found.high)}], n = {found.n}")
    return [*cells, quantity(float(np.nanmedian(by_block)))]

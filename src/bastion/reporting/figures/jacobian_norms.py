"""The bound of Table 2 of Wang and Ruan 2022, and how loose it is."""

from __future__ import annotations

import numpy as np

from bastion.measuring.measurement import MeasuredCase
from bastion.reporting.figures import Figure, Table, by_case, fact, figures
from bastion.reporting.figures.jacobian import estimate_cell
from bastion.reporting.tables import SharedTable, TableRow
from bastion.reporting.wording import quantity

COLUMNS = {
    "table_2": "Table 2: √(max ‖J‖₁ · max ‖J‖∞)",
    "exact": "largest singular value",
    "looseness": "bound over exact",
    "by_block": "of one block",
}
CAPTION = (
    "Of every block with its skip connection, means over the images with their intervals. Table 2 takes the largest "
    "‖J‖₁ and the largest ‖J‖∞, which may be of different blocks; the last column is the median of √(‖J‖₁‖J‖∞) over σ "
    "of one block at a time."
)


@figures.register("jacobian-norms")
@by_case
def jacobian_norms(table: SharedTable, case: MeasuredCase) -> list[Figure]:
    numbers = Table(["run", *COLUMNS.values()], [(row.name, _cells(row, case)) for row in table.rows])
    return [Figure(f"{case.label}: the bound without singular values", caption=CAPTION, table=numbers)]


def _cells(row: TableRow, case: MeasuredCase) -> list[str]:
    facts = {name: fact(row, case, name).astype(np.float64) for name in case.columns}
    exact = np.nanmax(facts["sigma"], axis=1)
    by_block = np.sqrt(facts["norm_1"] * facts["norm_inf"]) / facts["sigma"]
    means = [row.facts.estimate(column) for column in (facts["table_2"], exact, facts["looseness"])]
    return [*map(estimate_cell, means), quantity(float(np.nanmedian(by_block)))]

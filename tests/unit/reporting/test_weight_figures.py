"""Figures of the studies of weights and loss: what they say is what was stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import measure_cases

from bastion.measuring.facts import Facts
from bastion.measuring.runner import measure
from bastion.models import Classifier
from bastion.models.weight_kinds import KINDS as WEIGHT_KINDS
from bastion.reporting import figures, svg
from bastion.reporting.figures import Figure, sparsity
from bastion.reporting.figures.landscape import MANY, LossGrid, _levels, _mean_at, _top
from bastion.reporting.html import report
from bastion.reporting.tables import read_runs, shared_tables
from bastion.run import create_run
from bastion.types import DataSet

STUDIES: dict[str, Any] = {
    "sparse": "sparsity",
    "norms": {"name": "weight-norms", "images": 48},
    "lemma": {"name": "rademacher", "images": 48, "draws": 50},
    "around": {"name": "landscape", "points": 3, "n": 16, "threat": {"norm": "linf", "eps": 0.05}, "attack": "fgsm"},
    "along": {"name": "landscape", "points": 3, "n": 16, "dimensions": 1},
    "sharp": {"name": "sharpness", "n": 16, "iterations": 6, "probes": 2},
}


@pytest.fixture
def measured(tiny_model: Classifier, tiny_data: DataSet, tmp_path: Path) -> Facts:
    return measure(tiny_model, tiny_data, {"studies": STUDIES}, folder=tmp_path / "run")


def drawn(facts: Facts) -> dict[str, Figure]:
    (table,) = shared_tables(read_runs([facts.run.folder]))
    return {figure.title: figure for figure in figures.draw(table)}


def test_every_study_has_its_figures_and_the_page_shows_them(measured: Facts, tmp_path: Path) -> None:
    found = drawn(measured)
    assert list(found) == [
        "Sparsity of the weights",
        "Norms of the weights",
        "Rademacher complexity of linear classifiers, ε = 8/255",
        *("Contours of the clean loss (around)", "The clean loss as a surface (around)"),
        *("Contours of the adversarial loss (around)", "The adversarial loss as a surface (around)"),
        "Rise of the loss (around)",
        "Loss along a direction (along)",
        "Sharpness",
    ]
    page = report(measured.run.folder, tmp_path / "report.html").read_text()
    assert all(title in page for title in found)
    assert "mathdefault" not in page  # ticks are no TeX


def test_tables_say_what_was_stored(measured: Facts) -> None:
    found, facts = drawn(measured), measured.studies()
    table = found["Sparsity of the weights"].table
    assert table is not None
    assert list(table.columns) == ["run", "all weights", "convolution", "all, by tensor", "kurtosis"]  # what it has
    assert table.rows[0][1][0] == f"{100 * facts['sparse']['share'][0, 0]:.1f} %"
    sharp = found["Sharpness"].table
    assert sharp is not None
    assert sharp.rows[0][1][0] == f"{facts['sharp']['loss'][0]:.4g}"
    assert sharp.rows[0][1][3].endswith(f" ± {facts['sharp']['lowest_residual'][0]:.1g}")
    norms = found["Norms of the weights"].table
    assert norms is not None and norms.rows[0][1][-1] == "–"  # no attention, so no term
    assert norms.columns[-1] == "largest term at ε = 8/255"
    around = found["Rise of the loss (around)"].table
    assert around is not None
    assert [name for name, _ in around.rows] == ["run, clean", "run, adversarial"]
    assert around.rows[0][1][0] == f"{facts['around']['clean'][1, 1]:.4g}"


def test_sharpness_without_a_residual_of_the_smallest_eigenvalue_is_shown(tmp_path: Path) -> None:
    """Facts from before it was stored."""
    scalars = dict.fromkeys(("loss", "rise", "top", "lowest", "trace", "trace_error"), np.array([0.5]))
    columns = scalars | {"eigenvalues": np.array([[0.5, 0.25]]), "residuals": np.array([[1e-3, 1e-3]])}
    case = {"kind": "studies", "role": "analysis", "spec": {"name": "sharpness"}, "columns": columns}
    table = drawn(measure_cases(create_run(tmp_path / "run", 0), {"sharp": case}, n=1))["Sharpness"].table
    assert table is not None and table.rows[0][1] == ["0.5", "0.5", "0.5 ± 0.001", "0.5", "0.5 ± 0.5"]


def test_kinds_are_those_of_the_study() -> None:
    assert len(sparsity.KINDS) == len(WEIGHT_KINDS)  # all weights first, other ones not shown


def bowl(points: int) -> LossGrid:
    axis = np.linspace(-1, 1, points)
    return LossGrid(None, "clean", axis, axis, 1 + axis[:, None] ** 2 + axis**2)  # type: ignore[arg-type]


def test_the_rise_of_a_bowl_is_the_square_of_the_radius() -> None:
    grid = bowl(41)
    for radius in (0.25, 0.5, 1.0):
        assert _mean_at(grid, radius) == pytest.approx(1 + radius**2, abs=2e-3)
    assert np.isnan(_mean_at(grid, 1.5))
    line = grid._replace(beta=np.zeros(1), loss=1 + grid.alpha[:, None] ** 2)
    assert _mean_at(line, 0.5) == pytest.approx(1.25)


def test_contours_are_round_numbers_that_all_panels_share() -> None:
    grid = bowl(11)
    both = [grid, grid._replace(loss=2 * grid.loss)]
    assert _top(both) == 6
    assert _levels(both, 6) == [1.2, 1.5, 2, 2.5, 3, 4, 5, 6]
    steep = [grid._replace(loss=np.where(grid.loss == 1, 0.01, 1e6))]
    assert _top(steep) == 0.1  # ten times the middle
    assert 1 < len(_levels(steep, 0.1)) <= MANY
    flat = [grid._replace(loss=np.full((11, 11), 2.0))]
    assert len(_levels(flat, 2.0)) == 1


def drawn_losses(folder: Path, losses: np.ndarray[Any, Any]) -> dict[str, Figure]:
    """The figures of these losses on a grid."""
    columns = {"alpha": np.linspace(-1, 1, len(losses)), "clean": losses}
    columns["beta"] = np.tile(np.linspace(-1, 1, losses.shape[1]) if losses.shape[1] > 1 else 0.0, (len(losses), 1))
    case = {"kind": "studies", "role": "analysis", "spec": {"name": "landscape"}, "columns": columns}
    return drawn(measure_cases(create_run(folder, seed=0), {"grid": case}, n=1))


def test_losses_without_a_contour_are_drawn_all_the_same(tmp_path: Path) -> None:
    assert len(drawn_losses(tmp_path / "flat", np.full((3, 3), 2.303))) == 3


@pytest.mark.parametrize("places", ["a corner", "the model", "everywhere"])
@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_a_loss_without_a_logarithm_is_no_contour_and_harms_no_other(tmp_path: Path, value: float, places: str) -> None:
    losses = 1 + np.arange(25.0).reshape(5, 5)
    losses[{"a corner": (0, 0), "the model": (2, 2), "everywhere": ...}[places]] = value
    found = drawn_losses(tmp_path / "grid", losses)
    table = found["Rise of the loss (grid)"].table
    assert table is not None and len(found) == 3
    assert table.rows[0][1][0] == ("13" if places == "a corner" else "0" if value == 0 else "–")
    left_out = 0 if value == 0 else 25 if places == "everywhere" else 1
    caption = found["Rise of the loss (grid)"].caption
    assert (f"At {left_out} points the loss is not finite." in caption) is bool(left_out)
    assert len(drawn_losses(tmp_path / "line", losses[:, 2:3])) == 1


def test_levels_do_not_depend_on_a_loss_of_zero_or_nan() -> None:
    grid = bowl(11)
    for value in (0.0, np.nan, np.inf):
        loss = grid.loss.copy()
        loss[0, 0] = value
        both = [grid, grid._replace(loss=loss)]
        assert _levels(both, _top(both)) == [1.2, 1.5, 2, 2.5, 3]


@pytest.mark.parametrize(
    ("value", "text"), [(0.02, "0.02"), (5, "5"), (10_000, "10⁴"), (2e-7, "2·10⁻⁷"), (1000, "1000")]
)
def test_ticks_of_a_logarithmic_axis_are_plain(value: float, text: str) -> None:
    assert svg._plain(value) == text

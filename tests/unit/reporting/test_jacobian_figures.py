"""Figures of Jacobians: what they say is what was stored, and what theory makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import measure_cases
from tests.vits import small_vit

from bastion.measuring.facts import Facts
from bastion.measuring.runner import measure
from bastion.reporting import figures
from bastion.reporting.figures import Figure
from bastion.reporting.figures.perturbation_growth import growth
from bastion.reporting.html import report
from bastion.reporting.tables import read_runs, shared_tables
from bastion.run import create_run
from bastion.types import DataSet

SIGMA = np.array([[1.0, 3.0], [2.0, 2.0], [3.0, 1.0], [0.5, 0.5], [4.0, 1.5]])  # of F, by image and block


def columns(**changes: Any) -> dict[str, Any]:
    """Five images, of which the last is misclassified, and two blocks."""
    n = len(SIGMA)
    branch = SIGMA[:, :, None].astype(np.float32)
    named: dict[str, Any] = {
        "branch": branch,
        "branch_residual": np.full_like(branch, 2e-5),
        "block": branch + 1,
        "block_residual": np.full_like(branch, 7e-5),
        "network": SIGMA[:, :1].astype(np.float32),
        "network_residual": np.zeros((n, 1), np.float32),
        "table_1": np.where(np.arange(n) < 4, SIGMA.max(1) + 1, np.nan).astype(np.float32),
        "exponent": SIGMA.sum(1).astype(np.float32),
        "products": np.arange(n) + 100,
        "forward_mode": np.zeros(n, np.int64),
    }
    return named | changes


def cases(**changes: Any) -> dict[str, dict[str, Any]]:
    attacked = np.array([[1, 1.5, 4], [1, 2, 5], [2, 4, 9], [1, 1.2, 1.5], [np.nan] * 3], np.float32)
    return {
        "sigma": {"role": "analysis", "spec": {"name": "jacobian"}, "columns": columns(**changes)},
        "growth": {
            "role": "analysis",
            "spec": {"name": "perturbation-growth"},
            "threat": {"norm": "l2", "eps": 0.5},
            "columns": {
                "attacked": attacked,
                "entering": attacked[:, :-1],
                "noise": attacked / 2,
                "gain": attacked[:, 2],
            },
        },
        "distance": {
            "role": "attack",
            "spec": {"name": "distortion", "norm": "l2"},
            "columns": {"distance": np.array([0.4, 0.5, 0.3, 0.9, 0.0], np.float32)},
        },
    }


def drawn(facts: Facts) -> dict[str, Figure]:
    (table,) = shared_tables(read_runs([facts.run.folder]))
    return {figure.title: figure for figure in figures.draw(table)}


@pytest.fixture
def made(tmp_path: Path) -> Facts:
    return measure_cases(create_run(tmp_path / "run", 0), cases())


def test_aggregates_are_the_papers(made: Facts) -> None:
    table = drawn(made)["sigma: aggregates"].table
    assert table is not None and list(table.columns)[1] == "Table 1: largest block"
    values = SIGMA.max(1)[:4] + 1
    assert table.rows[0][1][0].startswith(f"{values.mean():.4g} ({values.std(ddof=1):.3g})<small>")
    assert table.rows[0][1][0].endswith("n = 4</small>")
    assert table.rows[0][1][-2:] == ["102", "7e-05"]


def test_a_fallback_to_forward_mode_is_told(tmp_path: Path) -> None:
    facts = measure_cases(create_run(tmp_path / "run", 0), cases(forward_mode=np.full(len(SIGMA), 3)))
    assert "run: 3 searches took forward mode" in drawn(facts)["sigma: aggregates"].caption


def test_blocks_without_a_branch_are_told(tmp_path: Path) -> None:
    branch = columns()["branch"].copy()
    branch[:, 1] = np.nan
    facts = measure_cases(create_run(tmp_path / "run", 0), cases(branch=branch))
    assert "1 blocks change the shape" in drawn(facts)["sigma: largest singular value of each block's branch F"].caption


def test_the_correlation_is_over_the_images_that_are_right(made: Facts) -> None:
    """Σσ is 4, 4, 4, 1 and the distances .4, .5, .3, .9: the image with the smallest exponent is furthest."""
    table = drawn(made)["sigma: singular values and smallest distances"].table
    assert table is not None
    assert table.rows[0][1][0].startswith("−0.77<small>") and table.rows[0][1][0].endswith("n = 4</small>")


def test_bounds_begin_at_the_first_block_and_multiply(made: Facts) -> None:
    grown = growth(made, made.case("growth"))
    assert grown.product is not None and grown.exponential is not None
    assert len(grown.attacked) == 4  # the clean mistake is left out
    assert np.allclose(
        grown.product, grown.attacked[:, :1] * np.array([[1, 2, 8], [1, 3, 9], [1, 4, 8], [1, 1.5, 2.25]])
    )
    assert np.allclose(grown.exponential[:, -1], grown.attacked[:, 0] * np.exp(SIGMA.sum(1)[:4]))
    table = drawn(made)["growth: growth of perturbations, ℓ2 ≤ 0.5"].table
    assert table is not None
    assert table.rows[0][1][:2] == ["4", "× 4.25"]
    assert table.rows[0][1][-1] == "0.0 %"


def test_what_stands_between_blocks_counts_as_measured_and_a_change_of_shape_as_the_whole_block(tmp_path: Path) -> None:
    branch = columns()["branch"].copy()
    branch[:, 1] = np.nan
    said = cases(branch=branch)
    said["growth"]["columns"]["entering"] = said["growth"]["columns"]["entering"] * [1, 3]
    facts = measure_cases(create_run(tmp_path / "run", 0), said)
    grown = growth(facts, facts.case("growth"))
    assert grown.product is not None
    assert np.allclose(grown.product[0], [1, 2, 2 * 3 * 4])  # 1 + 1, then thrice, then σ of x + F(x)


def test_growth_without_singular_values_has_no_bounds(tmp_path: Path) -> None:
    facts = measure_cases(create_run(tmp_path / "run", 0), {"growth": cases()["growth"]})
    assert growth(facts, facts.case("growth")).product is None
    assert "With the probe jacobian in the suite" in drawn(facts)["growth: growth of perturbations, ℓ2 ≤ 0.5"].caption


def test_a_bound_that_lacks_a_block_is_none(tmp_path: Path) -> None:
    """The second block changes the shape, and its σ as a whole was not measured."""
    branch = columns()["branch"].copy()
    branch[:, 1] = np.nan
    said = cases(branch=branch)
    for name in ("block", "block_residual"):
        del said["sigma"]["columns"][name]
    facts = measure_cases(create_run(tmp_path / "run", 0), said)
    assert growth(facts, facts.case("growth")).product is None
    figure = drawn(facts)["growth: growth of perturbations, ℓ2 ≤ 0.5"]
    assert "its parts branch and block" in figure.caption
    assert figure.table is not None and "images above" not in figure.table.columns


def test_the_bound_of_an_image_that_is_not_finite_is_left_blank(tmp_path: Path) -> None:
    branch = columns()["branch"].copy()
    branch[1] = np.nan
    facts = measure_cases(create_run(tmp_path / "run", 0), cases(branch=branch, block=branch))
    table = drawn(facts)["growth: growth of perturbations, ℓ2 ≤ 0.5"].table
    assert table is not None and table.rows[0][1][-4:] == ["× –", "× –", "–", "–"]


def test_a_singular_value_that_is_not_finite_has_no_rank(tmp_path: Path) -> None:
    exponent = columns()["exponent"].copy()
    exponent[3] = np.nan  # the only one that is not 4
    facts = measure_cases(create_run(tmp_path / "run", 0), cases(exponent=exponent))
    table = drawn(facts)["sigma: singular values and smallest distances"].table
    assert table is not None and table.rows[0][1][0] == "–"


def test_attention_without_a_bound_for_every_image_has_none_in_the_table(tmp_path: Path) -> None:
    blocks = np.array([0.0, 1.0])
    found = {
        "block": blocks,
        "measured": np.array([[2.0, 3.0], [4.0, 1.0]]),
        "residual": np.array([2e-5, 7e-5]),
        "reached_bound": np.array([8.0, 20.0]),
        "bound": np.array([10.0, np.nan]),  # no LayerNorm before the second
        "scale": np.ones((2, 1)),
        "scaled": np.array([[3.0], [4.0]]),
        "scaled_bound": np.array([[8.0], [20.0]]),
        "warning.unconverged": np.array([False, True]),
    }
    case = {"kind": "studies", "role": "analysis", "spec": {"name": "attention-lipschitz"}, "columns": found}
    facts = measure_cases(create_run(tmp_path / "run", 0), {"attention": case}, n=2)
    table = drawn(facts)["attention: Lipschitz constants of self-attention"].table
    assert table is not None and table.rows[0][1] == ["4", "7e-05", "8 to 20", "–", "× 3.833"]
    (warning,) = facts.warnings()
    assert warning.where == "1 of 2 parts, study attention"
    assert "attention/warning.unconverged" not in facts.scalars()


def test_measuring_prints_means_of_analyses(made: Facts) -> None:
    values = SIGMA.max(1)[:4] + 1
    (line,) = [line for line in made.table().splitlines() if line.startswith("sigma: table_1")]
    assert f"mean {values.mean():.4g} " in line and f"std {values.std(ddof=1):.3g}  n = 4" in line


def test_the_whole_suite_is_measured_and_drawn(tiny_data: DataSet, tmp_path: Path) -> None:
    suite = {
        "probes": {
            "clean": "accuracy",
            "jacobian": {"name": "jacobian", "top": 2},
            "norms": "jacobian-norms",
            "growth": {"name": "perturbation-growth", "threat": {"norm": "linf", "eps": 8 / 255}, "attack": "fgsm"},
        },
        "studies": {"attention": {"name": "attention-lipschitz", "images": 2}},
    }
    model = small_vit(size=8, depth=2).float()
    facts = measure(model, tiny_data, suite, limit=3, folder=tmp_path / "run")
    assert facts.columns["jacobian/block"].shape == (3, 2, 2)
    page = report(facts.run.folder, tmp_path / "report.html").read_text()
    for title in ("jacobian: aggregates", "norms: the bound", "growth of perturbations", "Lipschitz constants of self"):
        assert title in page
    assert "mathdefault" not in page

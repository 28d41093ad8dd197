"""What several suites say together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import Column, measure_cases

from bastion.measuring.intervals import wilson
from bastion.reporting.overview import Overview, overviews
from bastion.reporting.summary import summary
from bastion.reporting.tables import read_runs, shared_tables
from bastion.run import Run, create_run

CLEAN = {"clean": {"role": "clean", "columns": {"correct": np.arange(20) < 18}}}


def attack(right: Column, norm: str = "linf", eps: float = 8 / 255, **more: Any) -> dict[str, Any]:
    return {"role": "attack", "threat": {"norm": norm, "eps": eps}, "columns": {"correct": right}, **more}


def overview(*runs: Run) -> Overview:
    (made,) = overviews(shared_tables(read_runs([run.folder for run in runs])))
    return made


def values(made: Overview, number: int = 0) -> dict[str, float]:
    key = made.models[number].key
    return {each.name: each.cells[key].estimate.value for each in made.rows if key in each.cells}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(tmp_path / "run", seed=0)


def test_an_image_is_right_under_a_threat_if_no_suite_has_an_attack_that_fools_it(run: Run) -> None:
    measure_cases(run, CLEAN | {"pgd": attack(np.arange(20) < 12)}, suite="one")
    measure_cases(run, {"square": attack(np.arange(20) > 4)}, suite="two")
    made = overview(run)
    assert values(made) == {"clean": 0.9, "ℓ∞ ≤ 8/255": 0.35}
    (cell,) = made.rows[1].cells.values()
    assert cell.estimate == wilson(7, 20)
    assert cell.under == ("pgd", "square")


def test_what_falls_in_a_smaller_ball_falls_in_a_larger_one(run: Run) -> None:
    weak, strong = attack(np.arange(20) < 15, "l1", 40.0), attack(np.arange(20) < 2, "l1", 12.0)
    measure_cases(run, CLEAN | {"weak": weak}, suite="one")
    measure_cases(run, {"strong": strong}, suite="two")
    assert values(overview(run)) == {"clean": 0.9, "ℓ1 ≤ 12": 0.1, "ℓ1 ≤ 40": 0.1}


def test_an_attack_on_fewer_images_neither_shortens_nor_decides_a_row(run: Run) -> None:
    measure_cases(run, CLEAN | {"pgd": attack(np.arange(20) < 12)}, suite="one")
    measure_cases(run, {"few": attack(np.zeros(5, bool))}, suite="two")
    made = overview(run)
    assert values(made)["ℓ∞ ≤ 8/255"] == 0.6
    assert made.rows[1].n == 20


def test_a_row_is_of_the_images_that_all_models_have(run: Run, tmp_path: Path) -> None:
    other = create_run(tmp_path / "other", seed=0)
    for each, n in ((run, 20), (other, 10)):
        measure_cases(each, {"clean": {"role": "clean", "columns": {"correct": np.arange(n) < 9}}}, suite="one")
        measure_cases(each, {"pgd": attack(np.arange(n) < 5)}, suite="two")
    made = overview(run, other)
    assert [each.n for each in made.rows] == [10, 10]
    assert values(made, 0) == values(made, 1) == {"clean": 0.9, "ℓ∞ ≤ 8/255": 0.5}


def test_all_norms_together_and_all_corruptions_have_a_row(run: Run) -> None:
    measure_cases(run, CLEAN | {"linf": attack(np.arange(20) < 12), "l2": attack(np.arange(20) > 4, "l2", 0.5)})
    foggy = {
        f"fog severity={level}": {
            "role": "corruption",
            "at": {"severity": level},
            "columns": {"correct": np.arange(20) < 20 - 5 * level},
        }
        for level in (1, 2)
    }
    for suite in ("corruptions", "again"):
        measure_cases(run, foggy, suite=suite)
    found = values(overview(run))
    assert found["every threat above"] == 0.35
    assert found["corruptions"] == pytest.approx(0.625)


def test_models_that_were_measured_into_one_folder_are_not_mixed(run: Run) -> None:
    for number, right in enumerate((12, 3)):
        about: dict[str, Any] = {"weights": f"{number}", "model": f"model-{number}"}
        measure_cases(run, CLEAN, suite=f"one-{number}", **about)
        measure_cases(run, {"pgd": attack(np.arange(20) < right)}, suite=f"two-{number}", **about)
    made = overview(run)
    assert {model.name: values(made, number)["ℓ∞ ≤ 8/255"] for number, model in enumerate(made.models)} == {
        "run, model-0": 0.6,
        "run, model-1": 0.15,
    }


def test_models_of_equal_weights_are_not_mixed(run: Run) -> None:
    """One was measured after an attribute was changed; the overview and the first sentence are of that one."""
    old = {"created": "2026-01-01", "identity": "before"}
    measure_cases(run, CLEAN | {"pgd": attack(np.arange(20) < 3)}, suite="one", **old)
    measure_cases(run, {"square": attack(np.arange(20) < 2)}, suite="two", **old)
    new = {"created": "2026-01-02", "identity": "after"}
    measure_cases(run, CLEAN | {"pgd": attack(np.arange(20) < 12)}, suite="three", **new)
    measure_cases(run, CLEAN, suite="four", **new)
    tables = shared_tables(read_runs([run.folder]))
    assert values(overview(run)) == {"clean": 0.9, "ℓ∞ ≤ 8/255": 0.6}
    said = summary(tables, overviews(tables)).replace("\u00a0", " ")
    assert said.startswith("run: 90.0 % right on clean images, 60.0 % under attack (ℓ∞ ≤ 8/255).")


def test_models_with_different_attacks_are_not_compared(run: Run, tmp_path: Path) -> None:
    other = create_run(tmp_path / "other", seed=0)
    for each in (run, other):
        measure_cases(each, CLEAN | {"pgd": attack(np.arange(20) < 12)}, suite="one")
    measure_cases(run, {"clean": CLEAN["clean"], "strong": attack(np.arange(20) < 2)}, suite="two")
    measure_cases(other, CLEAN, suite="two")
    tables = shared_tables(read_runs([run.folder, other.folder]))
    made = overview(run, other)
    assert [each.same_probes for each in made.rows] == [True, False]
    assert "Their attacks differ" in summary(tables, overviews(tables))


def test_free_patches_have_no_row_and_a_single_suite_needs_no_overview(run: Run) -> None:
    measure_cases(run, CLEAN | {"patch": attack(np.zeros(20, bool), "linf", 1.0)}, suite="one")
    assert overviews(shared_tables(read_runs([run.folder]))) == []
    measure_cases(run, {"pgd": attack(np.arange(20) < 12)}, suite="two")
    assert list(values(overview(run))) == ["clean", "ℓ∞ ≤ 8/255"]


def test_the_first_sentence_tells_the_strongest_of_all_suites(run: Run) -> None:
    measure_cases(run, CLEAN | {"weak": attack(np.arange(20) < 15)}, suite="one")
    measure_cases(run, {"strong": attack(np.arange(20) < 2)}, suite="two")
    tables = shared_tables(read_runs([run.folder]))
    said = summary(tables, overviews(tables)).replace("\u00a0", " ")
    assert said == (
        "run: 90.0 % right on clean images, 10.0 % under attack (ℓ∞ ≤ 8/255). "
        "Measured on 20 images of cifar10-mini (test)."
    )

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_runs
import numpy as np
import pytest
from made_runs import MakeRun, measure_cases, measure_run, train_run
from tests.cards import write_card

from bastion import storage
from bastion.errors import BastionError
from bastion.measuring.facts import Columns, Facts, read_measurements, write_measurement
from bastion.measuring.intervals import wilson
from bastion.measuring.measurement import MeasuredAggregate
from bastion.measuring.paired import difference_sequence
from bastion.reporting.differences import differences
from bastion.reporting.html import report
from bastion.reporting.summary import page_title, summary
from bastion.reporting.tables import SharedTable, read_runs, shared_tables
from bastion.reporting.wording import interval, percent, quantity
from bastion.run import create_run


def test_numbers_read_as_people_write_them() -> None:
    assert percent(0.265) == "26.5"
    assert interval(wilson(53, 200)) == "20.9–33.0"  # by hand from Wilson's formula
    assert interval(wilson(0, 200)) == "0.0–1.9"
    assert quantity(0.0313725) == "0.03137"
    assert quantity(float("nan")) == "–"


def test_runs_asked_the_same_share_a_table(make_run: MakeRun) -> None:
    runs = [make_run("robust", clean=0.47, robust=0.265), make_run("standard", clean=0.55, robust=0)]
    (table,) = shared_tables(read_runs(run.folder for run in runs))
    assert [row.name for row in table.rows] == ["robust", "standard"]
    assert table.columns == ["clean", "pgd-20", "worst case"]
    assert table.threat("pgd-20") == "ℓ∞ ≤ 8/255"
    assert table.threat("clean") == ""
    assert table.rows[0].accuracies["pgd-20"] == wilson(53, 200)
    assert table.rows[1].accuracies["worst case"] == wilson(0, 200)


@pytest.mark.parametrize(
    "change",
    [
        {"data": {"name": "cifar10-mini", "fingerprint": "beef", "split": "test"}},
        {"data": {"name": "cifar10-mini", "fingerprint": "f00d", "split": "val"}},
        {"suite": "other"},
    ],
    ids=["data", "split", "suite"],
)
def test_runs_asked_differently_are_not_compared(make_run: MakeRun, change: dict[str, object]) -> None:
    runs = [make_run("a", clean=0.5, robust=0.2), make_run("b", clean=0.5, robust=0.2, about=change)]
    assert [len(each.rows) for each in shared_tables(read_runs(run.folder for run in runs))] == [1, 1]


def test_runs_asked_by_other_probes_are_not_compared(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_run("a", clean=0.5, robust=0.2)
    monkeypatch.setitem(made_runs.SPECS, "attack", {"name": "adversarial", "attack": {"name": "pgd", "steps": 1}})
    other = make_run("b", clean=0.5, robust=0.2)
    assert [len(each.rows) for each in shared_tables(read_runs([one.folder, other.folder]))] == [1, 1]


def test_runs_whose_probes_have_other_columns_are_not_compared(make_run: MakeRun) -> None:
    one, other = make_run("a", clean=0.5, robust=0.2), make_run("b", clean=0.5, robust=0.2)
    (path,) = other.measurements.iterdir()
    content = storage.read_json(path)
    content["cases"][0]["columns"].remove("prediction")
    storage.write_json(path, content)
    assert [len(each.rows) for each in shared_tables(read_runs([one.folder, other.folder]))] == [1, 1]


def test_facts_of_earlier_weights_stand_apart_and_are_marked(make_run: MakeRun) -> None:
    run = make_run("robust", clean=0.5, robust=0.2)
    write_card(run, "5eed")
    assert [each.outdated for each in shared_tables(read_runs([run.folder]))] == [""]
    measure_run(run, clean=0.6, robust=0.3, about={"weights": "beef"}, identity="later")
    write_card(run, "beef")
    new, old = shared_tables(read_runs([run.folder]))
    assert (new.outdated, old.outdated) == ("", "weights")
    assert old.title == "cifar10-mini, test split, suite demo; of earlier weights"
    assert (new.rows[0].accuracies["clean"].value, old.rows[0].accuracies["clean"].value) == (0.6, 0.5)


def test_facts_of_earlier_code_stand_apart_and_are_marked(make_run: MakeRun) -> None:
    """The same weights with another attribute are another model."""
    run = make_run("robust", clean=0.5, robust=0.4, about={"created": "2026-01-01"})
    measure_run(run, clean=0.6, robust=0.3, about={"created": "2026-01-02"}, identity="later")
    new, old = shared_tables(read_runs([run.folder]))
    assert (new.outdated, old.outdated) == ("", "code")
    assert old.title == "cifar10-mini, test split, suite demo; of earlier code"
    assert (new.rows[0].accuracies["clean"].value, old.rows[0].accuracies["clean"].value) == (0.6, 0.5)
    assert "60.0\u00a0% right" in summary([new, old])


def test_code_that_is_changed_back_is_the_newest_once_measured_again(make_run: MakeRun) -> None:
    run = make_run("robust", clean=0.5, robust=0.4, about={"created": "2026-01-01"})
    (first,) = read_measurements(run)
    measure_run(run, clean=0.6, robust=0.3, about={"created": "2026-01-02"}, identity="later")
    write_measurement(run, first.about.model_copy(update={"created": "2026-01-03"}), changed=False)
    tables = shared_tables(read_runs([run.folder]))
    assert [(each.rows[0].accuracies["clean"].value, each.outdated) for each in tables] == [(0.5, ""), (0.6, "code")]


def test_runs_are_compared_on_the_images_that_all_have(make_run: MakeRun) -> None:
    runs = [make_run("few", clean=0.5, robust=0.2, n=100), make_run("many", clean=0.5, robust=0.2)]
    (table,) = shared_tables(read_runs(run.folder for run in runs))
    assert table.n == 100
    assert [(row.name, row.measured, row.facts.n) for row in table.rows] == [("few", 100, 100), ("many", 200, 100)]
    assert [row.name for row in table.longer] == ["many"]
    (all_facts,) = read_measurements(runs[1])
    first = all_facts.correct("clean")[:100]
    assert table.rows[1].accuracies["clean"] == wilson(int(first.sum()), 100)
    assert table.rows[1].accuracies["clean"] != wilson(50, 100)  # what all 200 would give


def test_a_measurement_that_was_continued_is_shown_once(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    right = np.arange(60) % 3 > 0
    facts = measure_cases(run, {"clean": {"role": "clean", "columns": {"correct": right}}})
    write_measurement(run, facts.first(30).about)
    assert len(read_measurements(run)) == 2
    (table,) = shared_tables(read_runs([run.folder]))
    assert [row.facts.n for row in table.rows] == [60]


def test_the_headline_has_the_mean_over_corruptions_and_not_each(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    shares = {("fog", 1): 0.9, ("fog", 2): 0.7, ("blur", 1): 0.8, ("blur", 2): 0.2}
    cases = {
        f"accuracy corruption={kind} severity={severity}": {
            "role": "corruption",
            "at": {"corruption": kind, "severity": severity},
            "columns": {"correct": np.arange(10) < round(10 * share)},
        }
        for (kind, severity), share in shares.items()
    }
    clean = {"clean": {"role": "clean", "columns": {"correct": np.arange(10) < 9}}}
    measure_cases(run, clean | cases)
    (table,) = shared_tables(read_runs([run.folder]))
    assert table.columns == ["clean", "mean over corruptions"]
    assert table.rows[0].accuracies["mean over corruptions"].value == pytest.approx(0.65)
    said = summary([table]).replace("\u00a0", " ")
    assert said.startswith("run: 90.0 % right on clean images, 65.0 % under corruptions, on average.")


def test_a_mean_that_the_suite_declares_takes_the_place(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    cases = {
        name: {"role": "corruption", "columns": {"correct": np.arange(10) < right}}
        for name, right in {"fog": 4, "snow": 8}.items()
    }
    mean = MeasuredAggregate(kind="mean", members={"fog": 1.0, "snow": 1.0})
    measure_cases(run, cases, aggregates={"corrupted": mean})
    (table,) = shared_tables(read_runs([run.folder]))
    assert {label: each.value for label, each in table.rows[0].accuracies.items()} == {"corrupted": 0.6}


def test_the_title_says_who_is_compared_on_what(make_run: MakeRun) -> None:
    runs = read_runs(make_run(name, clean=0.5, robust=0.2).folder for name in "abcde")
    assert page_title(runs[:1], shared_tables(runs[:1])) == "a on cifar10-mini"
    assert page_title(runs[:3], shared_tables(runs[:3])) == "a, b and c on cifar10-mini"
    assert page_title(runs, shared_tables(runs)) == "5 models on cifar10-mini"
    assert page_title(runs[:2], []) == "a and b"


def test_one_suite_with_other_values_of_its_axes_has_them_in_the_title(tmp_path: Path) -> None:
    for name, model in (("random", None), ("learned", "runs/rspc")):
        asked = {"role": "analysis", "at": {"size": 4, "corruption_model": model}, "spec": {"corruption_model": model}}
        case = {**asked, "columns": {"correct": np.arange(10) < 5}}
        measure_cases(create_run(tmp_path / name, seed=0), {"occlusion": case})
    common = "cifar10-mini, test split, suite made"
    both = shared_tables(read_runs([tmp_path / "random", tmp_path / "learned"]))
    assert {table.title for table in both} == {common, f"{common}, corruption_model=runs/rspc"}
    assert shared_tables(read_runs([tmp_path / "learned"]))[0].title == common


def test_the_name_of_a_radius_is_left_to_the_threat(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    cases = {
        f"pgd eps={level}/255": {
            "role": "attack",
            "at": {"eps": level / 255},
            "threat": {"norm": "linf", "eps": level / 255},
            "columns": {"correct": np.arange(10) < 5},
        }
        for level in (2, 8)
    }
    measure_cases(run, cases)
    (table,) = shared_tables(read_runs([run.folder]))
    told = [(table.name(label), table.threat(label)) for label in table.columns]
    assert told == [("pgd", "ℓ∞ ≤ 2/255"), ("pgd", "ℓ∞ ≤ 8/255")]


def test_a_two_phase_estimate_is_told_with_its_name_and_interval_and_has_no_paired_difference(tmp_path: Path) -> None:
    phases = {"survived": np.arange(40) < 20, "sampled": np.arange(40) < 10, "lost": np.arange(40) < 1}
    threat = {"norm": "linf", "eps": 8 / 255}
    cases = {
        "clean": {"role": "clean", "columns": {"correct": np.arange(40) < 30}},
        "aa": {"role": "attack", "threat": threat, "columns": phases},
    }
    runs = [create_run(tmp_path / name, seed=0) for name in "ab"]
    for run in runs:
        measure_cases(run, cases)
    (table,) = shared_tables(read_runs([run.folder for run in runs]))
    assert table.columns == ["clean", "aa"]
    assert table.threat("aa") == "ℓ∞ ≤ 8/255, two-phase estimate"
    (difference,) = differences(table)
    assert list(difference.by_label) == ["clean"]
    low, high = (f"{100 * each:.1f}" for each in table.rows[0].accuracies["aa"][1:3])
    assert f"45.0\u00a0% (two-phase estimate, {low}–{high}) under attack" in summary([table])


def test_two_phases_without_a_sample_are_told_as_a_range(tmp_path: Path) -> None:
    phases = {"survived": np.arange(40) < 20, "sampled": np.zeros(40, bool), "lost": np.zeros(40, bool)}
    cases = {
        "clean": {"role": "clean", "columns": {"correct": np.arange(40) < 30}},
        "aa": {"role": "attack", "threat": {"norm": "linf", "eps": 8 / 255}, "columns": phases},
    }
    run = create_run(tmp_path / "run", seed=0)
    measure_cases(run, cases)
    (table,) = shared_tables(read_runs([run.folder]))
    range_ = interval(table.rows[0].accuracies["aa"])
    assert f", {range_}\u00a0% (two-phase estimate) under attack" in summary([table])
    page = report(run.folder, tmp_path / "page.html").read_text()
    assert f"<b></b><small>{range_}</small>" in page
    assert not re.search(r">\s*nan", page)


def test_differences_of_measurements_that_stopped_early_are_of_all_examples(tmp_path: Path) -> None:
    runs = []
    for name, right in (("a", 12), ("b", 20)):
        runs.append(create_run(tmp_path / name, seed=0))
        measure_cases(runs[-1], {"clean": {"role": "clean", "columns": {"correct": np.arange(40) < right}}})
    (table,) = shared_tables(read_runs([run.folder for run in runs]))
    rows = [
        replace(row, facts=replace(row.facts, about=row.facts.about.model_copy(update={"population": 100})))
        for row in table.rows
    ]
    (difference,) = differences(SharedTable(rows))
    clean = difference.by_label["clean"]
    assert (clean.difference, clean.p) == (difference_sequence(8, 0, 40, 100), None)


def test_a_run_asked_twice_is_told_apart_by_the_time(make_run: MakeRun) -> None:
    run = make_run("robust", clean=0.5, robust=0.2, about={"created": "2026-01-01"})
    measure_run(run, clean=0.5, robust=0.2, about={"created": "2026-01-02"}, version="-2")
    (table,) = shared_tables(read_runs([run.folder]))
    assert [row.name for row in table.rows] == ["robust, 2026-01-01", "robust, 2026-01-02"]


@pytest.mark.parametrize(("about", "marks"), [({"seed": 7}, ["seed 3", "seed 7"]), ({"model": "b"}, ["a", "b"])])
def test_a_run_asked_twice_is_told_apart_by_what_differs(
    make_run: MakeRun, about: dict[str, object], marks: list[str]
) -> None:
    run = make_run("robust", clean=0.5, robust=0.2, about={"model": "a"})
    measure_run(run, clean=0.5, robust=0.2, about={"model": "a"} | about, version="-2")
    (table,) = shared_tables(read_runs([run.folder]))
    assert sorted(row.name for row in table.rows) == [f"robust, {mark}" for mark in marks]


def test_a_run_given_twice_is_read_once(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    assert len(read_runs([run.folder, f"{tmp_path}/../{tmp_path.name}/run"])) == 1


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    folders = [create_run(tmp_path / parent / "run", seed=0).folder for parent in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == [str(folder) for folder in folders]


def test_the_summary_is_made_from_the_facts(make_run: MakeRun) -> None:
    runs = [make_run("robust", clean=0.47, robust=0.265), make_run("standard", clean=0.55, robust=0)]
    said = summary(shared_tables(read_runs(run.folder for run in runs))).replace("\u00a0", " ")
    assert said == (
        "robust: 47.0 % right on clean images, 26.5 % under attack (ℓ∞ ≤ 8/255); standard: 55.0 % and 0.0 %. "
        "Measured on 200 images of cifar10-mini (test)."
    )


def test_the_summary_tells_how_many_attacks_the_worst_case_is_the_worst_of(make_run: MakeRun) -> None:
    (run,) = read_runs([make_run("robust", clean=0.47, robust=0.265).folder])
    (facts,) = run.measurements
    cases = (*facts.about.cases, facts.case("pgd-20").model_copy(update={"label": "other"}))
    about = facts.about.model_copy(update={"cases": cases})
    twice = replace(run, measurements=[Facts(run.files, about, Columns(run.files, about))])
    assert "26.5\u00a0% under the worst of 2 attacks." in summary(shared_tables([twice]))


def test_the_summary_says_so_if_nothing_was_measured(tmp_path: Path) -> None:
    run = train_run(tmp_path / "run", robust=0)
    assert summary(shared_tables(read_runs([run.folder]))) == "No accuracy has been measured yet."


def test_other_values_carry_the_n_they_are_made_of(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    confidence = np.where(np.arange(10) < 4, 0.5, np.nan).astype(np.float32)
    columns = {"correct": np.ones(10, bool), "in_budget": np.ones(10, bool), "distance": confidence, "sure": confidence}
    measure_cases(run, {"pgd": {"role": "attack", "columns": columns, "meanings": {"sure": "of the prediction"}}})
    (table,) = shared_tables(read_runs([run.folder]))
    (sure,) = table.measures()["pgd/sure"]
    assert (sure.n, sure.value) == (4, 0.5)
    assert table.meaning("pgd/sure") == "of the prediction"
    assert list(table.measures()) == ["pgd/sure"]  # the others are shown elsewhere, or say nothing


def test_no_run_and_no_run_directory_are_errors(tmp_path: Path) -> None:
    with pytest.raises(BastionError, match="no run was given"):
        read_runs([])
    with pytest.raises(BastionError, match=r"not a run, not a folder with card\.json"):
        read_runs([tmp_path])


def test_damaged_facts_are_an_error_that_names_the_file(make_run: MakeRun) -> None:
    run = make_run("robust", clean=0.5, robust=0.2)
    shutil.rmtree(run.facts)
    with pytest.raises(BastionError, match=r"identity/0: 200 of 200 facts are missing; measure again"):
        shared_tables(read_runs([run.folder]))


def test_a_long_curve_and_a_grid_are_left_to_their_sections(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    right = {"columns": {"correct": np.ones(10, bool)}}
    cases: dict[str, dict[str, Any]] = {"clean": {"role": "clean", **right}}
    for level in (1, 2, 4, 8):
        cases[f"pgd eps={level}/255"] = {"role": "attack", "at": {"eps": level / 255}, **right}
        cases[f"many eps={level}/255 steps=9"] = {"role": "attack", "at": {"eps": level / 255, "steps": 9}, **right}
    measure_cases(run, cases)
    (table,) = shared_tables(read_runs([run.folder]))
    assert table.columns == ["clean", *(f"pgd eps={level}/255" for level in (1, 2, 4, 8))]
    assert table.charted == []  # the clean accuracy alone

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import measure_cases, measure_everything
from PIL import Image
from tests.cards import write_card
from tests.many_models import DATA, make_run, summarize

from bastion import storage
from bastion.data.corrupted import corrupted
from bastion.data.imagefolder import imagefolder
from bastion.errors import BastionError
from bastion.measuring.intervals import wilson
from bastion.measuring.measurement import MeasuredAggregate, MeasuredCase, MeasuredThreat
from bastion.measuring.runner import measure
from bastion.measuring.store import FactStore
from bastion.models import Classifier
from bastion.reporting.boards import Board, cell, read_boards
from bastion.reporting.leaderboard import leaderboard
from bastion.reporting.leaderboard_files import write_csv, write_robustbench
from bastion.run import Run, create_run
from bastion.suite import load_suite
from bastion.types import DataSet

EVIL = "<script>alert('x')</script>"


def numbers(board: Board) -> dict[str, dict[str, float]]:
    """By model and title of a column, in %."""
    return {
        entry.model: {
            column.name: round(100 * entry.numbers[column.key].value, 2)
            for column in board.columns
            if column.key in entry.numbers
        }
        for entry in board.entries
    }


def test_the_best_model_comes_first_with_the_numbers_of_its_summary(tmp_path: Path) -> None:
    for name, robust in {"weak": 0.2, "strong": 0.6, "middle": 0.4}.items():
        summarize(make_run(tmp_path / "deep" / name), 0.8, {"autoattack linf": robust}, parameters=7)
    ((board,), problems) = read_boards(tmp_path)
    assert problems == []
    assert [entry.model for entry in board.entries] == ["strong", "middle", "weak"]
    assert board.title == "cifar10, test split"
    assert [column.name for column in board.columns] == [
        "clean",
        "autoattack linf (ℓ∞ ≤ 8/255)",
        "worst case (of clean, autoattack linf)",
    ]
    strong = board.entries[0]
    assert strong.numbers[board.columns[1].key] == wilson(600, 1000)
    assert (strong.parameters, strong.n) == (7, 1000)


def test_no_facts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_everything(create_run(tmp_path / "run", seed=0))

    def refuse(*_: object) -> None:
        raise AssertionError("facts were read")

    monkeypatch.setattr(FactStore, "read", refuse)
    boards, _ = read_boards(tmp_path)
    assert numbers(boards[0])["run"]["clean"] == 79.17


@pytest.mark.parametrize("change", [{"digest": "0ther"}, {"split": "val"}], ids=["images", "split"])
def test_other_images_are_another_table(tmp_path: Path, change: dict[str, str]) -> None:
    summarize(make_run(tmp_path / "a"), 0.8, {"autoattack linf": 0.4})
    summarize(make_run(tmp_path / "b"), 0.8, {"autoattack linf": 0.4}, data=DATA["cifar10"] | change)
    boards, _ = read_boards(tmp_path)
    assert [[entry.model for entry in board.entries] for board in boards] == [["a"], ["b"]]


def attacked(folder: Path, steps: int, *, label: str = "pgd", eps: float = 0.5, seed: int = 0) -> None:
    """A run under PGD, its facts stored under the name that measuring gives them."""
    spec = {"name": "adversarial", "threat": {"norm": "l2", "eps": eps}, "attack": {"name": "pgd", "steps": steps}}
    case = {
        "role": "attack",
        "threat": {"norm": "l2", "eps": eps},
        "spec": spec,
        "columns": {"correct": np.ones(8, bool)},
    }
    run = create_run(folder, seed=seed)
    facts = measure_cases(run, {label: case}, seed=seed)
    plain = f"identity/{storage.fingerprint({'probes': spec, 'seed': seed}, digits=16)}"
    about = facts.about.model_copy(update={"cases": (facts.case(label).model_copy(update={"store": plain}),)})
    for path in run.measurements.iterdir():
        path.unlink()
    storage.write_json(run.measurements / "made.json", about.model_dump(mode="json"))


def test_other_attacks_and_threats_are_other_columns(tmp_path: Path) -> None:
    attacked(tmp_path / "a", steps=10)
    attacked(tmp_path / "b", steps=20)
    attacked(tmp_path / "c", steps=10, eps=1.0)
    ((board,), _) = read_boards(tmp_path)
    assert [column.name for column in board.columns] == ["pgd (ℓ2 ≤ 0.5)", "pgd (2) (ℓ2 ≤ 0.5)", "pgd (ℓ2 ≤ 1)"]
    assert "steps: 20" in board.columns[1].spec
    assert sorted(len(entry.numbers) for entry in board.entries) == [1, 1, 1]


def test_the_same_attack_under_another_label_or_seed_shares_a_column(tmp_path: Path) -> None:
    attacked(tmp_path / "a", steps=10)
    attacked(tmp_path / "b", steps=10, label="pgd-10", seed=3)
    ((board,), _) = read_boards(tmp_path)
    assert [column.title for column in board.columns] == ["pgd"]


def test_a_variant_of_the_data_shares_a_column_whatever_the_seed(
    tmp_path: Path, tiny_model: Classifier, tiny_data: DataSet
) -> None:
    fog = {"name": "accuracy", "role": "corruption", "data": {"corruption": "fog", "severity": 3}}
    mist = {**fog, "data": {"corruption": "fog", "severity": 1}}
    for seed, probe in enumerate((fog, fog, mist)):
        measure(tiny_model, tiny_data, {"probes": {"fog": probe}}, seed=seed, limit=2, folder=tmp_path / str(seed))
    ((board,), _) = read_boards(tmp_path)
    assert [column.title for column in board.columns] == ["fog", "fog (2)"]


def test_numbers_of_images_drawn_at_random_say_so(tmp_path: Path) -> None:
    """They share a column with numbers of the first images."""
    summarize(make_run(tmp_path / "runs" / "first"), 0.8, {"autoattack linf": 0.4}, n=150)
    summarize(make_run(tmp_path / "runs" / "random"), 0.8, {"autoattack linf": 0.3}, n=200, population=1000)
    ((board,), _) = leaderboard(tmp_path / "runs", tmp_path / "page.html")
    cells = re.findall(
        r'data-n="(\d+)"(?: data-population="(\d+)")?>[\d.]+<small>[\d.–]+</small>(?:<small>([^<]*)</small>)?',
        (tmp_path / "page.html").read_text(),
    )
    assert set(cells) == {("150", "", ""), ("200", "1000", "n = 200 of 1,000 at random")}
    write_csv([board], tmp_path / "numbers.csv")
    lines = csv.DictReader((tmp_path / "numbers.csv").read_text().splitlines())
    assert {line["model"]: line["clean population"] for line in lines} == {"first": "", "random": "1000"}
    infos = {path: info["footnote"] for path, info in exported(tmp_path / "runs").items()}
    assert infos["cifar10/Linf/random.json"] == "Measured on 200 of 1,000 images of the test split, drawn at random."


def test_two_phases_without_a_sample_are_a_range_and_have_no_rank(tmp_path: Path) -> None:
    threat = {"norm": "linf", "eps": 8 / 255}
    for name, sampled in (("a", 0), ("b", 5), ("c", 10)):
        survived = np.arange(40) < 10 + sampled
        phases = {"survived": survived, "sampled": np.arange(40) < sampled, "lost": np.zeros(40, bool)}
        case = {"role": "attack", "threat": threat, "spec": {"name": "two-phase"}, "columns": phases}
        facts = measure_cases(create_run(tmp_path / name, seed=0), {"two-phase": case})
        assert "nan" not in facts.table() + repr(facts) + facts._repr_html_()
    ((board,), _) = leaderboard(tmp_path, tmp_path / "page.html")
    assert [entry.model for entry in board.entries] == ["c", "b", "a"]
    assert not re.search(r'data-value="nan"|>\s*nan', (tmp_path / "page.html").read_text())
    low, high = (f"{100 * each:.1f}" for each in board.entries[-1].numbers[board.sorted_by.key][1:3])
    assert f">–<small>{low}–{high}</small>" in (tmp_path / "page.html").read_text()


def test_a_variant_of_the_data_is_another_column_though_the_probe_is_the_same(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    case = {"role": "clean", "spec": {"name": "accuracy"}, "columns": {"correct": np.ones(8, bool)}}
    measure_cases(run, {"clean": case, "small": case})  # their stores have other names
    ((board,), _) = read_boards(tmp_path)
    assert [column.title for column in board.columns] == ["clean", "small"]


def test_of_several_measurements_the_one_with_most_images_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    summarize(run, 0.9, {"autoattack linf": 0.5}, n=100)
    summarize(run, 0.8, {"autoattack linf": 0.4}, n=1000)
    summarize(run, 0.7, {"autoattack linf": 0.3}, n=500)
    ((board,), _) = read_boards(tmp_path)
    assert numbers(board)["a"]["clean"] == 80


def test_an_n_that_differs_is_shown_with_the_number(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    summarize(run, 0.9, {"autoattack linf": 0.5}, n=100)
    summarize(run, 0.8, {"autoattack l2": 0.4}, n=1000)
    page = tmp_path / "page.html"
    leaderboard(tmp_path, page)
    cells = re.findall(r"<td data-value=[^>]*>([\d.]+)<small>([^<]*)</small>", page.read_text())
    shown = dict(cells)
    assert shown["50.0"].endswith(" n = 100")
    assert "n =" not in shown["80.0"]


def test_corruptions_are_one_column(tmp_path: Path) -> None:
    measure_everything(create_run(tmp_path / "run", seed=0))
    ((board,), _) = read_boards(tmp_path)
    (column,) = board.columns_of("corruption")
    assert column.name == "mean over corruptions (of 15 probes)"
    assert cell(board.entries[0], column) == {"value": "0.522778", "low": "", "high": "", "n": 120, "population": ""}


def test_a_mean_over_corruptions_that_the_suite_declares_has_its_interval(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    cases = {
        name: {"role": "corruption", "columns": {"correct": np.arange(10) < right}}
        for name, right in {"fog": 4, "snow": 8}.items()
    }
    mean = MeasuredAggregate(kind="mean", members={"fog": 1.0, "snow": 1.0})
    measure_cases(run, cases, aggregates={"corrupted": mean})
    ((board,), _) = read_boards(tmp_path)
    assert [(column.kind, column.title) for column in board.columns] == [("corruption", "corrupted")]
    assert board.entries[0].numbers[board.columns[0].key].low < 0.6


def test_flip_rates_confidence_and_distances_are_columns(tmp_path: Path) -> None:
    """By type they are left out, as accuracies under one corruption are."""
    run = create_run(tmp_path / "run", seed=0)
    flips = {
        f"flips perturbation={name}": {
            "role": "corruption",
            "at": {"perturbation": name},
            "columns": {"flip_rate": np.full(8, rate, np.float32)},
        }
        for name, rate in {"tilt": 0.25, "scale": 0.5}.items()
    }
    cases: dict[str, Any] = flips | {
        "clean": {"role": "clean", "columns": {"correct": np.arange(8) < 6}},
        "confidence": {"role": "analysis", "columns": {"confidence": np.full(8, 0.75, np.float32)}},
        "near": {"role": "attack", "columns": {"distance": np.linspace(1, 3, 8, dtype=np.float32)}},
    }
    aggregates = {
        "mean flip rate": MeasuredAggregate(kind="mean", members=dict.fromkeys(flips, 1.0), column="flip_rate"),
        "tilt": MeasuredAggregate(kind="mean", members={"flips perturbation=tilt": 1.0}, column="flip_rate"),
        "mFR": MeasuredAggregate(kind="sum", members=dict.fromkeys(flips, 0.8), column="flip_rate"),
        "mean confidence": MeasuredAggregate(kind="mean", members={"confidence": 1.0}, column="confidence"),
        "mean distance": MeasuredAggregate(kind="mean", members={"near": 1.0}, column="distance"),
    }
    facts = measure_cases(run, cases, aggregates=aggregates)
    ((board,), _) = leaderboard(tmp_path, tmp_path / "page.html")
    assert [(column.title, column.kind) for column in board.columns] == [
        ("clean", "clean"),
        ("mean flip rate", "errors"),
        ("mFR", "errors"),
        ("mean confidence", "other"),
        ("mean distance", "other"),
    ]
    (entry,) = board.entries
    for column in board.columns[1:]:
        assert entry.numbers[column.key] == facts.aggregate(column.title)
    shown = re.findall(r"<td data-value=[^>]*>([\d.]+)<small>([^<]*)</small>", (tmp_path / "page.html").read_text())
    assert [value for value, _ in shown] == ["75.0", "37.5", "60.0", "75.0", "2"]  # a distance is no percentage
    assert board.sorted_by.title == "clean"


def test_an_aggregate_of_the_only_corruption_is_a_column(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    case = {"role": "corruption", "columns": {"flip_rate": np.full(8, 0.25, np.float32)}}
    mean = MeasuredAggregate(kind="mean", members={"tilt": 1.0}, column="flip_rate")
    measure_cases(run, {"tilt": case}, aggregates={"flips": mean})
    ((board,), _) = read_boards(tmp_path)
    assert numbers(board) == {"run": {"flips (of tilt)": 25.0}}


@pytest.mark.parametrize(
    ("label", "name"),
    [("aa", "aa (ℓ∞ ≤ 8/255, two-phase estimate)"), ("aa-two-phase", "aa-two-phase (ℓ∞ ≤ 8/255)")],
)
def test_a_two_phase_estimate_is_a_column_with_its_name_and_interval(tmp_path: Path, label: str, name: str) -> None:
    phases = {"survived": np.arange(40) < 20, "sampled": np.arange(40) < 10, "lost": np.arange(40) < 1}
    case = {"role": "attack", "threat": {"norm": "linf", "eps": 8 / 255}, "columns": phases}
    case |= {"members": ("apgd-ce", "apgd-t", "fab-t", "square"), "spec": {"name": "two-phase"}}
    clean = {"role": "clean", "columns": {"correct": np.arange(40) < 30}}
    facts = measure_cases(create_run(tmp_path / "run", seed=0), {"clean": clean, label: case})
    ((board,), _) = read_boards(tmp_path)
    assert [column.name for column in board.columns] == ["clean", name]
    assert board.entries[0].numbers[board.sorted_by.key] == facts.two_phase(label).population
    assert write_robustbench([board], tmp_path / "info") == []


def test_models_of_one_name_are_told_apart_by_their_weights(tmp_path: Path) -> None:
    for number, weights in enumerate(["aaaaaaaaaa", "bbbbbbbbbb"]):
        attacked(tmp_path / str(number) / "same", steps=10)
        path = tmp_path / str(number) / "same" / "measurements" / "made.json"
        about = storage.read_json(path) | {"weights": weights}
        about["cases"][0]["store"] = about["cases"][0]["store"].replace("identity", weights)
        storage.write_json(path, about)
    ((board,), _) = read_boards(tmp_path)
    assert sorted(entry.model for entry in board.entries) == ["same (aaaaaaaa)", "same (bbbbbbbb)"]


def test_models_of_one_name_and_equal_weights_are_told_apart_by_their_code(tmp_path: Path) -> None:
    for identity in ("c0de1", "c0de2"):
        attacked(tmp_path / identity / "same", steps=10)
        path = tmp_path / identity / "same" / "measurements" / "made.json"
        about = storage.read_json(path)
        about["cases"][0]["store"] = about["cases"][0]["store"].replace("identity", identity)
        storage.write_json(path, about)
    ((board,), _) = read_boards(tmp_path)
    assert sorted(entry.model for entry in board.entries) == ["same (5eed, code c0de1)", "same (5eed, code c0de2)"]


def test_facts_of_weights_that_a_run_no_longer_has_are_left_out(tmp_path: Path) -> None:
    for name, weights in {"new": "beef", "old": "0ld"}.items():
        run = make_run(tmp_path / name)
        write_card(run, "beef", model={"name": "vit/t"})
        summarize(run, 0.8, {"autoattack linf": 0.4}, weights=weights)
    ((board,), _) = read_boards(tmp_path)
    assert [(entry.model, entry.parameters, entry.architecture) for entry in board.entries] == [("new", 12, "vit/t")]


@pytest.mark.parametrize("content", [{"model": None}, {"model": {"name": ["x"]}}, {"about": 3}, {"parameters": "many"}])
def test_a_card_of_another_form_is_told(tmp_path: Path, content: dict[str, Any]) -> None:
    summarize(make_run(tmp_path / "good"), 0.8, {"autoattack linf": 0.4})
    strange = make_run(tmp_path / "strange")
    write_card(strange, "beef", **content)
    summarize(strange, 0.8, {"autoattack linf": 0.4}, weights="beef")
    ((board,), problems) = read_boards(tmp_path)
    assert [entry.model for entry in board.entries] == ["good"]
    (wrong,) = content
    assert re.fullmatch(rf".*card.json: not a model card that this version reads \({wrong}.*", problems[0])


def test_a_damaged_measurement_is_left_out_and_told(tmp_path: Path) -> None:
    summarize(make_run(tmp_path / "good"), 0.8, {"autoattack linf": 0.4})
    broken = make_run(tmp_path / "broken")
    broken.measurements.mkdir()
    (broken.measurements / "x.json").write_text("{")
    boards, problems = leaderboard(tmp_path, tmp_path / "page.html")
    assert [entry.model for entry in boards[0].entries] == ["good"]
    assert len(problems) == 1 and "x.json: not readable as JSON" in problems[0]
    assert "1 run could not be read, and is left out." in (tmp_path / "page.html").read_text()


def test_nothing_to_show_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BastionError, match="no measured model below"):
        read_boards(tmp_path)
    with pytest.raises(BastionError, match="is not a folder"):
        read_boards(tmp_path / "none")


def test_names_are_never_markup(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    data = {"name": EVIL, "split": EVIL, "fingerprint": EVIL, "digest": EVIL}
    summarize(run, 0.8, {"autoattack linf": 0.4}, model=EVIL, data=data, doubts=(EVIL,))
    leaderboard(tmp_path, tmp_path / "page.html")
    content = (tmp_path / "page.html").read_text()
    assert content.count("<script") == 1  # its own
    assert content.count("&lt;script&gt;") > 5


def test_the_policy_lets_its_own_script_and_style_run_and_nothing_else(tmp_path: Path) -> None:
    summarize(make_run(tmp_path / "run"), 0.8, {"autoattack linf": 0.4})
    leaderboard(tmp_path, tmp_path / "page.html")
    content = (tmp_path / "page.html").read_text()
    (policy,) = re.findall('Content-Security-Policy" content="([^"]+)"', content)
    for tag in ("script", "style"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", content, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src &#39;sha256-{digest}&#39;" in policy.replace("&#43;", "+")
    assert policy.startswith("default-src &#39;none&#39;") and "unsafe" not in policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", content)
    assert not re.search(r"\sstyle=|\son\w+=", content)


def test_a_report_in_the_runs_folder_is_linked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / 'a "b" #1')
    summarize(run, 0.8, {"autoattack linf": 0.4})
    (run.folder / "report.html").write_text("")
    (tmp_path / "pages").mkdir()
    leaderboard(tmp_path / "runs", tmp_path / "pages" / "page.html")
    assert 'href="../runs/a%20%22b%22%20%231/report.html"' in (tmp_path / "pages" / "page.html").read_text()


def test_csv_has_a_line_for_each_model_and_data_set(tmp_path: Path) -> None:
    summarize(make_run(tmp_path / "a"), 0.8, {"autoattack linf": 0.4}, parameters=5, doubts=("nan",))
    summarize(make_run(tmp_path / "b"), 0.5, {"autoattack l2": 0.3}, data=DATA["imagenet"], model="=cmd()")
    boards, _ = read_boards(tmp_path)
    write_csv(boards, tmp_path / "numbers.csv")
    first, second = csv.DictReader((tmp_path / "numbers.csv").read_text().splitlines())
    assert (first["model"], first["data"], first["parameters"], first["warnings"]) == ("a", "cifar10", "5", "nan")
    clean = [float(first[f"clean{part}"]) for part in ("", " low", " high", " n")]
    assert clean == pytest.approx([*wilson(800, 1000)], rel=1e-5)
    assert second["model"] == "'=cmd()"  # no formula
    assert (second["autoattack linf (ℓ∞ ≤ 8/255)"], second["autoattack l2 (ℓ2 ≤ 0.5)"]) == ("", "0.3")


def test_robustbench_files_have_its_fields_and_keep_what_people_wrote(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "Mine2026Robust")
    summarize(run, 0.9, {"autoattack linf": 0.45, "autoattack l2": 0.6}, n=500, doubts=("zero-gradient",))
    summarize(run, 0.8, {}, n=1000)
    boards, _ = read_boards(tmp_path / "runs")
    files = write_robustbench(boards, tmp_path / "info")
    names = [path.relative_to(tmp_path / "info").as_posix() for path in files]
    assert sorted(names) == ["cifar10/L2/Mine2026Robust.json", "cifar10/Linf/Mine2026Robust.json"]
    linf = tmp_path / "info" / "cifar10" / "Linf" / "Mine2026Robust.json"
    assert json.loads(linf.read_text()) == {
        "link": None,
        "name": "Mine2026Robust",
        "authors": None,
        "additional_data": None,
        "number_forward_passes": None,
        "dataset": "cifar10",
        "venue": None,
        "architecture": None,
        "eps": "8/255",
        "clean_acc": "90.00",  # on the images that were attacked
        "reported": None,
        "autoattack_acc": "45.00",
        "footnote": "Measured on 500 images of the test split.",
        "unreliable": True,
        "n": 500,
    }
    linf.write_text(json.dumps(json.loads(linf.read_text()) | {"authors": "A. Author", "clean_acc": "1"}))
    write_robustbench(boards, tmp_path / "info")
    again = json.loads(linf.read_text())
    assert (again["authors"], again["clean_acc"]) == ("A. Author", "90.00")


def test_published_models_stand_beside_measured_ones(tmp_path: Path) -> None:
    """As RobustBench's folder model_info has them; another radius or data set is another question."""
    summarize(make_run(tmp_path / "runs" / "mine"), 0.8, {"autoattack linf": 0.4})
    for name, change in {
        "Better2024": {},
        "Flagged2020": {"autoattack_acc": "18.50", "unreliable": True},
        "Radius2019": {"eps": "0.031"},
        "Other2021": {"dataset": "cifar100"},
    }.items():
        said = {"dataset": "cifar10", "eps": "8/255", "clean_acc": "93.24", "autoattack_acc": "72.08"} | change
        storage.write_text(tmp_path / "info" / "cifar10" / "Linf" / f"{name}.json", json.dumps(said))
    (tmp_path / "info" / "cifar10" / "Linf" / "broken.json").write_text("[]")
    page = tmp_path / "page.html"
    ((board,), problems) = leaderboard(tmp_path / "runs", page, published=tmp_path / "info")
    assert numbers(board) == {
        "Better2024 (published)": {"clean": 93.24, "autoattack linf (ℓ∞ ≤ 8/255)": 72.08},
        "mine": {"clean": 80.0, "autoattack linf (ℓ∞ ≤ 8/255)": 40.0, "worst case (of clean, autoattack linf)": 40.0},
        "Flagged2020 (published)": {"clean": 93.24, "autoattack linf (ℓ∞ ≤ 8/255)": 18.5},
    }
    assert list(numbers(board)) == ["Better2024 (published)", "mine", "Flagged2020 (published)"]
    assert board.entries[0].n == 10_000 and [bool(entry.doubts) for entry in board.entries] == [False, False, True]
    unread, unmatched = problems
    assert "broken.json: not a JSON file of RobustBench" in unread
    assert unmatched == f"2 of 5 files of {tmp_path / 'info'} match no column (other eps, norm or data)"
    assert "Better2024 (published)" in page.read_text()
    assert [path.stem for path in write_robustbench([board], tmp_path / "written")] == ["mine"]
    with pytest.raises(BastionError, match="published: no file"):
        leaderboard(tmp_path / "runs", page, published=tmp_path / "runs")


def test_of_published_numbers_the_lower_counts_on_as_many_images_as_the_file_says(tmp_path: Path) -> None:
    """An external evaluation may be lower than AutoAttack; bastion's own files say on how many images they are."""
    summarize(make_run(tmp_path / "runs" / "mine"), 0.8, {"autoattack linf": 0.4})
    said = {"dataset": "cifar10", "eps": "8/255", "clean_acc": "90.00", "autoattack_acc": "60.00"}
    for name, change in {"Adaptive": {"external": "50.00"}, "Weaker": {"external": "70.00"}, "Few": {"n": 50}}.items():
        storage.write_text(tmp_path / "info" / "cifar10" / "Linf" / f"{name}.json", json.dumps(said | change))
    storage.write_text(tmp_path / "info" / "cifar10" / "Linf" / "None.json", json.dumps(said | {"n": "many"}))
    ((board,), problems) = leaderboard(tmp_path / "runs", tmp_path / "page.html", published=tmp_path / "info")
    key = next(column.key for column in board.columns if column.is_autoattack)
    found = {entry.model.split()[0]: entry.numbers[key] for entry in board.entries if entry.published}
    assert found == {"Adaptive": wilson(5000, 10_000), "Weaker": wilson(6000, 10_000), "Few": wilson(30, 50)}
    assert len(problems) == 1 and "None.json: not a JSON file of RobustBench (n: expected a number" in problems[0]


def test_corruption_files_are_read_as_they_are_written(tmp_path: Path) -> None:
    measured_corruptions(make_run(tmp_path / "runs" / "mine"), "cifar10-c", "cifar10-c")
    write_robustbench(read_boards(tmp_path / "runs")[0], tmp_path / "info")
    ((board,), problems) = leaderboard(tmp_path / "runs", tmp_path / "page.html", published=tmp_path / "info")
    mine, theirs = sorted(board.entries, key=lambda entry: entry.published)
    key = next(column.key for column in board.columns if column.is_published_corruptions)
    assert (theirs.model, theirs.numbers[key].value, theirs.numbers[key].n) == ("mine (published)", 0.55, 1000)
    assert mine.numbers[key].value == 0.55 and not problems


@pytest.mark.parametrize(
    "content",
    [
        *('{"autoattack_acc": "250"}', '{"clean_acc": -5}', f'{{"clean_acc": {10**400}}}', '{"autoattack_acc": [1]}'),
        *('{"eps": "1/0"}', '{"architecture": ["x"]}', "[" * 100_000 + "]" * 100_000),
    ],
)
def test_published_numbers_that_are_none_are_left_out_and_told(tmp_path: Path, content: str) -> None:
    summarize(make_run(tmp_path / "runs" / "mine"), 0.8, {"autoattack linf": 0.4})
    said = json.dumps({"dataset": "cifar10", "eps": "8/255", "clean_acc": "93.24", "autoattack_acc": "72.08"})
    storage.write_text(tmp_path / "info" / "cifar10" / "Linf" / "odd.json", f"{said[:-1]}, {content[1:]}")
    os.mkfifo(tmp_path / "info" / "cifar10" / "Linf" / "pipe.json")
    ((board,), problems) = leaderboard(tmp_path / "runs", tmp_path / "page.html", published=tmp_path / "info")
    assert list(numbers(board)) == ["mine"]
    assert ["not a JSON file of RobustBench" in each for each in problems] == [True, True]


@pytest.mark.parametrize("split", ["train", "val"])
def test_published_models_stand_beside_numbers_on_test_images_only(tmp_path: Path, split: str) -> None:
    summarize(make_run(tmp_path / "runs" / "a"), 0.8, {"autoattack linf": 0.4}, data=DATA["cifar10"] | {"split": split})
    said = {"dataset": "cifar10", "eps": "8/255", "clean_acc": "93.24", "autoattack_acc": "72.08"}
    storage.write_text(tmp_path / "info" / "cifar10" / "Linf" / "Other2024.json", json.dumps(said))
    ((board,), _) = leaderboard(tmp_path / "runs", tmp_path / "page.html", published=tmp_path / "info")
    assert [entry.model for entry in board.entries] == ["a"]


@pytest.mark.parametrize(("data", "classes"), [("imagenet-val", 1000), ("cifar10", 10), ("cifar100", 100)])
def test_numbers_on_some_of_the_classes_are_not_robustbenchs(tmp_path: Path, data: str, classes: int) -> None:
    eps, name = (4 / 255, "imagenet") if data == "imagenet-val" else (8 / 255, data)
    about: dict[str, Any] = {"data": DATA["cifar10"] | {"name": data}}
    said = {"dataset": name, "eps": str(eps), "clean_acc": "93.24", "autoattack_acc": "72.08"}
    storage.write_text(tmp_path / "info" / name / "Linf" / "Other2024.json", json.dumps(said))
    for count, folder in ((classes, tmp_path / "all"), (classes - 1, tmp_path / "some")):
        about["classes"] = tuple(map(str, range(count)))
        attacked_by_autoattack(make_run(folder / "mine"), {eps: 0.6}, about=about)
        ((board,), _) = leaderboard(folder, tmp_path / "page.html", published=tmp_path / "info")
        assert len(board.entries) == (2 if count == classes else 1)
        assert list(exported(folder)) == ([f"{name}/Linf/mine.json"] if count == classes else [])


def test_robustbench_is_given_no_other_attack_as_autoattack(tmp_path: Path) -> None:
    attacked(tmp_path / "a", steps=10)
    boards, _ = read_boards(tmp_path)
    assert write_robustbench(boards, tmp_path / "info") == []


def attacked_by_autoattack(
    run: Run, robust: dict[float, float], *, about: dict[str, Any] | None = None, **change: Any
) -> None:
    """AutoAttack at linf: accuracies by radius."""
    cases, summary = [], {}
    for eps, share in robust.items():
        threat = MeasuredThreat(norm="linf", eps=eps)
        spec = {"name": "adversarial", "threat": threat.model_dump(), "attack": {"name": "autoattack"}}
        said = {"label": f"autoattack eps={eps}", "kind": "probes", "role": "attack", "n": 1000, "spec": spec}
        said |= {"store": f"identity/{storage.fingerprint([spec, change])}", "threat": threat, "columns": ("correct",)}
        said |= {"members": ("apgd-ce", "apgd-t", "fab-t", "square")}
        cases.append(MeasuredCase(**said | change))
        summary[cases[-1].label] = wilson(round(1000 * share), 1000)
    summarize(run, 0.9, {}, cases=tuple(cases), aggregates={}, summary=summary, **(about or {}))


def exported(folder: Path) -> dict[str, dict[str, Any]]:
    boards, _ = read_boards(folder)
    files = write_robustbench(boards, folder / "info")
    return {path.relative_to(folder / "info").as_posix(): json.loads(path.read_text()) for path in files}


def test_pictures_that_are_resized_otherwise_are_another_table_and_named_for_robustbench(
    tmp_path: Path, tiny_model: Classifier
) -> None:
    for n in range(4):
        folder = tmp_path / "pictures" / "train" / "abc"[n % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 12), (60 * n, 90, 20)).save(folder / f"{n}.png")
    attacked = {"name": "adversarial", "threat": {"norm": "linf", "eps": 8 / 255}, "attack": "autoattack"}
    for crop_pct in (0.5, 1.0):
        data = imagefolder(str(tmp_path / "pictures" / "train"), size=8, crop_pct=crop_pct, test_only=True)
        measure(tiny_model, data, {"probes": {"aa": attacked}}, folder=tmp_path / "run", limit=2)
    boards, _ = read_boards(tmp_path)
    made = {"8 pixels, crop 0.5, bicubic", "8 pixels, crop 1, bicubic"}
    assert {board.title for board in boards} == {f"imagefolder, test split, {each}" for each in made}
    ((_, info),) = exported(tmp_path).items()
    assert any(f"({each})" in info["footnote"] for each in made)


def test_robustbench_is_given_numbers_on_test_images_only(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    summarize(run, 0.8, {"autoattack linf": 0.30})
    summarize(run, 0.9, {"autoattack linf": 0.77}, data=DATA["cifar10"] | {"split": "train", "digest": "7ra1"})
    ((path, info),) = exported(tmp_path).items()
    assert (path, info["autoattack_acc"]) == ("cifar10/Linf/a.json", "30.00")


def test_of_two_samples_of_the_data_set_robustbench_is_given_the_larger(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    summarize(run, 0.8, {"autoattack linf": 0.30}, n=1000)
    summarize(run, 0.8, {"autoattack linf": 0.50}, n=100, data=DATA["cifar10"] | {"digest": "5ub5e7"})
    boards, _ = read_boards(tmp_path)
    for order in (boards, boards[::-1]):
        (path,) = write_robustbench(order, tmp_path / "info")
        assert json.loads(path.read_text())["autoattack_acc"] == "30.00"


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"name": "transfer", "source": "zoo/x", "attack": {"name": "autoattack"}}},
        {"data": {"corruption": "fog", "severity": 3}},
    ],
    ids=["transfer", "corrupted images"],
)
def test_autoattack_against_another_model_or_on_other_images_is_not_robustbenchs(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    attacked_by_autoattack(make_run(tmp_path / "runs" / "a"), {8 / 255: 0.6}, **change)
    assert exported(tmp_path / "runs") == {}
    said = {"dataset": "cifar10", "eps": "8/255", "clean_acc": "93.24", "autoattack_acc": "72.08"}
    storage.write_text(tmp_path / "info" / "cifar10" / "Linf" / "Other2024.json", json.dumps(said))
    ((board,), _) = leaderboard(tmp_path / "runs", tmp_path / "page.html", published=tmp_path / "info")
    assert [entry.model for entry in board.entries] == ["a"]


def test_corrupted_images_are_a_table_of_their_own_name_and_not_robustbenchs(
    tmp_path: Path, tiny_model: Classifier, tiny_data: DataSet
) -> None:
    attacked = {"name": "adversarial", "threat": {"norm": "linf", "eps": 8 / 255}, "attack": "autoattack"}
    foggy = corrupted(replace(tiny_data, name="cifar10"), corruption="fog", severity=5)
    facts = measure(tiny_model, foggy, {"probes": {"aa": attacked}}, folder=tmp_path / "run", limit=2)
    assert facts.table().startswith("classifier on cifar10:corruption=fog,severity=5 (test)")
    ((board,), _) = read_boards(tmp_path)
    assert board.title == "cifar10:corruption=fog,severity=5, test split"
    assert exported(tmp_path) == {}
    said = {"dataset": "cifar10", "eps": "8/255", "clean_acc": "93.24", "autoattack_acc": "72.08"}
    storage.write_text(tmp_path / "info" / "cifar10" / "Linf" / "Other2024.json", json.dumps(said))
    ((board,), _) = leaderboard(tmp_path, tmp_path / "page.html", published=tmp_path / "info")
    assert len(board.entries) == 1


def test_of_several_radii_robustbench_is_given_its_own_else_the_smallest_with_a_note(tmp_path: Path) -> None:
    attacked_by_autoattack(make_run(tmp_path / "own"), {4 / 255: 0.6, 8 / 255: 0.4, 16 / 255: 0.1})
    attacked_by_autoattack(make_run(tmp_path / "other"), {16 / 255: 0.1, 4 / 255: 0.6})
    infos = exported(tmp_path)
    own, other = infos["cifar10/Linf/own.json"], infos["cifar10/Linf/other.json"]
    assert (own["eps"], own["autoattack_acc"]) == ("8/255", "40.00")
    assert own["footnote"] == "Measured on 1000 images of the test split."
    assert (other["eps"], other["autoattack_acc"]) == ("4/255", "60.00")
    assert other["footnote"] == "Measured on 1000 images of the test split. RobustBench lists eps 8/255."


def measured_corruptions(run: Run, suite: str, data: str) -> None:
    """What a shipped suite leaves: 55 % under all corruptions, 66 % under those without noise."""
    loaded = load_suite(suite)
    cases = [
        MeasuredCase(
            label=case.label, kind="probes", role=case.role or "clean", n=1000, spec={"name": "accuracy"}, at=case.at,
            store=f"identity/{storage.fingerprint([data, case.data])}", data=case.data, columns=("correct",),
        )
        for case in loaded.cases()
    ]  # fmt: skip
    kinds = {name: each.kind for name, each in loaded.aggregates.items()}
    aggregates = {name: MeasuredAggregate(kind=kind, members=loaded.members(name)) for name, kind in kinds.items()}
    shares = {case.label: 0.11 if "noise" in case.label else 0.66 for case in cases} | dict.fromkeys(aggregates, 0.66)
    shares |= {"clean": 0.9, "mean corruption accuracy": 0.55}
    summary = {label: wilson(round(1000 * share), 1000) for label, share in shares.items()}
    said = {"cases": tuple(cases), "aggregates": aggregates, "summary": summary}
    said["classes"] = tuple(map(str, range(1000 if data == "imagenet-c" else 10)))
    summarize(run, 0.9, {}, data=DATA["cifar10"] | {"name": data}, **said)


@pytest.mark.parametrize(
    ("suite", "data", "name"), [("cifar10-c", "cifar10-c", "cifar10"), ("imagenet-c", "imagenet-c", "imagenet")]
)
def test_robustbench_is_given_the_mean_over_all_published_corruptions(
    tmp_path: Path, suite: str, data: str, name: str
) -> None:
    measured_corruptions(make_run(tmp_path / "a"), suite, data)
    ((path, info),) = exported(tmp_path).items()
    assert path == f"{name}/corruptions/a.json"
    assert (info["dataset"], info["corruptions_acc"], info["clean_acc"]) == (name, "55.00", "90.00")
    assert (info["eps"], info["footnote"]) == (None, "Measured on 1000 images of the test split.")


@pytest.mark.parametrize(
    ("suite", "data"), [("corruptions", "cifar10"), ("cifar10-c", "cifar10"), ("corruptions-extra", "cifar10-c")]
)
def test_other_corruptions_are_not_robustbenchs(tmp_path: Path, suite: str, data: str) -> None:
    """Those made on the fly are other images, with frost_proc also of another type."""
    measured_corruptions(make_run(tmp_path / "a"), suite, data)
    assert exported(tmp_path) == {}


def test_what_was_really_measured_is_listed(tmp_path: Path, tiny_model: Classifier, tiny_data: DataSet) -> None:
    suite = {"probes": {"clean": "accuracy", "sanity": {"name": "sanity", "threat": {"norm": "linf", "eps": 0.05}}}}
    facts = measure(tiny_model, tiny_data, suite, folder=tmp_path / "run")
    ((board,), _) = read_boards(tmp_path)
    (entry,) = board.entries
    assert entry.parameters == sum(each.numel() for each in tiny_model.parameters())
    assert facts.about.macs == 8 * 3 * 9 * 8 * 8 + 8 * 3  # its convolution and its last layer
    assert entry.doubts == {warning.code for warning in facts.warnings()}
    assert entry.numbers[board.columns[0].key] == facts.accuracies()["clean"]


def test_a_leaderboard_needs_no_torch(tmp_path: Path) -> None:
    summarize(make_run(tmp_path / "run"), 0.8, {"autoattack linf": 0.4})
    code = (
        "import sys; from bastion.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    command = ["leaderboard", str(tmp_path), "-o", str(tmp_path / "l.html"), "--csv", str(tmp_path / "l.csv")]
    command += ["--robustbench", str(tmp_path / "info")]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *command], check=True, capture_output=True, text=True
    )
    assert "(1 models)" in done.stdout and "robustbench: 1 files" in done.stdout

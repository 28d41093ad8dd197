"""What the sections of a report say, against facts whose numbers are known beforehand."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from made_runs import MakeRun, measure_cases, measure_everything

from bastion.measuring.compare import compare as compare_models
from bastion.measuring.intervals import bounded_mean, wilson
from bastion.measuring.measurement import MeasuredAggregate
from bastion.measuring.sampling import confidence_sequence
from bastion.reporting import plots
from bastion.reporting.boards import read_boards
from bastion.reporting.costs import cost_table
from bastion.reporting.differences import differences
from bastion.reporting.grids import class_table, confusions, heat_maps
from bastion.reporting.histograms import distance_panel
from bastion.reporting.html import report
from bastion.reporting.robustness_curves import Distances, distances, resolution_curves, security_curves
from bastion.reporting.tables import SharedTable, read_runs, shared_tables
from bastion.run import create_run

N = 120


@pytest.fixture
def everything(tmp_path: Path) -> SharedTable:
    run = create_run(tmp_path / "run", seed=0)
    measure_everything(run, N)
    (table,) = shared_tables(read_runs([run.folder]))
    return table


def above(threshold: float) -> int:
    """How many of the examples are above it: their strengths are 0, 1/N, …"""
    return sum(number / N > threshold for number in range(N))


def test_accuracy_over_eps_begins_at_the_clean_accuracy(everything: SharedTable) -> None:
    pgd, _ = security_curves(everything)
    (line,) = pgd.lines
    assert (pgd.title, pgd.norm) == ("pgd", "linf")
    assert line.x == [0.0, 2 / 255, 4 / 255, 8 / 255]
    assert line.estimates == [wilson(above(0.2 + harm), N) for harm in (0, 0.1, 0.2, 0.4)]


def test_a_curve_of_distances_is_the_share_of_images_further_away(everything: SharedTable) -> None:
    _, curve = security_curves(everything)
    (line,) = curve.lines
    distance = everything.rows[0].facts.columns["distance/distance"]
    assert (curve.norm, curve.is_step) == ("l2", True)
    assert line.x[0] == 0
    assert line.estimates[0] == everything.rows[0].accuracies["clean"]  # clean mistakes have distance 0
    assert line.estimates[-1].value == 0
    for radius, estimate in zip(line.x, line.estimates, strict=True):
        assert estimate == wilson(int((distance > radius).sum()), N)


def test_an_image_that_nothing_fools_keeps_the_curve_up(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    distance = np.array([0, 0.5, 1.0, np.inf], np.float32)
    measure_cases(run, {"far": {"role": "attack", "spec": {"norm": "l2"}, "columns": {"distance": distance}}})
    (table,) = shared_tables(read_runs([run.folder]))
    (line,) = security_curves(table)[0].lines
    assert [each.value for each in line.estimates] == [0.75, 0.5, 0.25]
    (told,) = distances(table)["far"]
    assert (told.median, told.mistakes, told.unfooled, told.found.tolist()) == (0.5, 1, 1, [0.5, 1.0])


@pytest.mark.parametrize("norm", ["linf", "l2", ""])
def test_a_panel_of_distances_begins_at_zero_even_if_nothing_was_found(norm: str) -> None:
    for found in (np.zeros(0), np.array([0.3])):
        panel = distance_panel("far", [Distances("run", 0, norm, 0.0, found, 0, 1)])
        assert ">0<" in panel or ">0.0<" in panel or ">0.00<" in panel


def test_all_sections_allow_for_stopping_early(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    facts = measure_everything(run, N, population=400)
    (table,) = shared_tables(read_runs([run.folder]))
    accuracies, told = facts.accuracies(), table.rows[0].accuracies
    assert accuracies["clean"] == told["clean"] == confidence_sequence(above(0.2), N, 400)
    pgd, stairs = security_curves(table)
    assert pgd.lines[0].estimates == [accuracies[label] for label in ("clean", *pgd_labels(table))]
    assert stairs.lines[0].estimates[0] == accuracies["clean"]
    (sizes,) = resolution_curves(table)
    assert sizes.lines[0].estimates == [accuracies[f"resized size={size}"] for size in (24, 32, 48)]
    (heat,) = heat_maps(table)
    assert heat.rows[0][1][0] == accuracies["corrupted corruption=fog severity=1"]
    classes = class_table(table)
    assert classes is not None
    right = int(facts.correct("clean")[facts.columns["clean/label"] == 0].sum())
    assert classes.rows[0].accuracies[0] == confidence_sequence(right, classes.rows[0].n, 400)


def pgd_labels(table: SharedTable) -> list[str]:
    return [label for label in table.columns if label.startswith("pgd")]


def test_means_over_corruptions_stay_between_0_and_1(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    cases = {
        f"fog severity={level}": {
            "role": "corruption",
            "at": {"severity": level},
            "columns": {"correct": np.ones(1, bool)},
        }
        for level in (1, 2)
    }
    measure_cases(run, cases)
    (table,) = shared_tables(read_runs([run.folder]))
    (heat,) = heat_maps(table)
    expected = bounded_mean(np.ones(1))
    assert table.rows[0].accuracies["mean over corruptions"] == expected
    assert [row[-1] for _, row in heat.rows] == [expected, expected]


def test_accuracy_over_image_size(everything: SharedTable) -> None:
    (chart,) = resolution_curves(everything)
    assert (chart.title, chart.lines[0].x) == ("resized", [24.0, 32.0, 48.0])
    assert chart.lines[0].estimates[1] == wilson(above(0.2), N)
    assert "resized size=24" not in everything.columns


def test_a_curve_over_eps_begins_at_the_clean_accuracy_of_its_own_size(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    cases = {}
    for size, right in {24: 5, 32: 8}.items():
        cases[f"clean size={size}"] = {
            "role": "clean",
            "at": {"size": size},
            "columns": {"correct": np.arange(10) < right},
        }
        for level in (1, 2):
            cases[f"pgd eps={level}/255 size={size}"] = {
                "role": "attack",
                "at": {"eps": level / 255, "size": size},
                "columns": {"correct": np.arange(10) < right - level},
            }
    measure_cases(run, cases)
    (table,) = shared_tables(read_runs([run.folder]))
    shown = {chart.title: [each.value for each in chart.lines[0].estimates] for chart in security_curves(table)}
    assert shown == {"pgd size=24": [0.5, 0.4, 0.3], "pgd size=32": [0.8, 0.7, 0.6]}
    by_size = {chart.title: [each.value for each in chart.lines[0].estimates] for chart in resolution_curves(table)}
    assert by_size == {"clean": [0.5, 0.8], "pgd eps=1/255": [0.4, 0.7], "pgd eps=2/255": [0.3, 0.6]}
    assert table.columns == []  # all of it is in the curves


def test_a_heat_map_has_a_cell_for_each_severity_and_means(everything: SharedTable) -> None:
    (shown,) = heat_maps(everything)
    assert shown.columns == ["1", "2", "3", "4", "5", "mean"]
    assert [name for name, _ in shown.rows] == ["fog", "gaussian_noise", "motion_blur", "mean"]
    fog = [each.value for each in dict(shown.rows)["fog"] if each]
    assert fog[:5] == [above(0.2 + 0.05 * severity) / N for severity in range(1, 6)]
    assert fog[5] == pytest.approx(np.mean(fog[:5]))
    cells = np.array([[each.value for each in estimates if each] for _, estimates in shown.rows])
    assert cells[-1] == pytest.approx(cells[:-1].mean(axis=0))
    assert cells[-1, -1] == pytest.approx(everything.rows[0].accuracies["mean over corruptions"].value)


def test_a_mean_over_one_corruption_stands_in_the_heat_map_alone(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    cases = {
        f"corrupted type={kind} severity={severity}": {
            "role": "corruption",
            "at": {"type": kind, "severity": severity},
            "columns": {"correct": np.arange(10) < right - severity},
        }
        for kind, right in {"fog": 9, "snow": 7, "blur": 5}.items()
        for severity in (1, 2)
    }
    kinds = {
        kind: MeasuredAggregate(kind="mean", members={label: 1.0 for label in cases if f"={kind} " in label})
        for kind in ("fog", "snow", "blur")
    }
    weather = MeasuredAggregate(kind="mean", members=kinds["fog"].members | kinds["snow"].members)
    mce = MeasuredAggregate(kind="errors", members=dict.fromkeys(cases, 0.5))
    measure_cases(run, cases, aggregates={**kinds, "weather": weather, "mCE": mce})
    (table,) = shared_tables(read_runs([run.folder]))
    assert table.columns == ["weather", "mean over corruptions"]
    (shown,) = heat_maps(table)
    assert [(name, round(cells[-1].value, 3)) for name, cells in shown.rows if cells[-1]] == [
        ("fog", 0.75),
        ("snow", 0.55),
        ("blur", 0.35),
        ("mean", 0.55),
    ]
    assert table.errors()["mCE"][0].value == pytest.approx(0.5 * (0.2 + 0.3 + 0.4 + 0.5 + 0.6 + 0.7))
    ((board,), _) = read_boards(tmp_path)
    assert [column.title for column in board.columns] == ["weather", "mean over corruptions", "mCE"]


def test_corruptions_without_severities_are_one_column(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    right = {"snow": 3, "rain": 5}
    cases = {
        name: {"role": "corruption", "columns": {"correct": np.arange(10) < count}} for name, count in right.items()
    }
    measure_cases(run, cases)
    (table,) = shared_tables(read_runs([run.folder]))
    (shown,) = heat_maps(table)
    assert shown.columns == ["accuracy", "mean"]
    assert [(name, cells[0].value) for name, cells in shown.rows if cells[0]] == [
        ("snow", 0.3),
        ("rain", 0.5),
        ("mean", pytest.approx(0.4)),
    ]


def test_accuracies_by_class_add_up(everything: SharedTable) -> None:
    table = class_table(everything)
    assert table is not None
    assert table.columns == ["clean", "worst case"]
    assert [row.n for row in table.rows] == [12] * 10
    for number, label in enumerate(table.columns):
        total = sum(row.n * row.accuracies[number].value for row in table.rows)
        assert total / N == pytest.approx(everything.rows[0].accuracies[label].value)


def test_only_the_worst_of_many_classes_are_shown(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    truth = np.repeat(np.arange(30), 4)
    seen = np.where(np.arange(120) % 4 < truth % 5, (truth + 1) % 30, truth)
    columns = {"correct": seen == truth, "prediction": seen, "label": truth}
    measure_cases(run, {"clean": {"role": "clean", "columns": columns}}, classes=tuple(map(str, range(30))))
    table = class_table(shared_tables(read_runs([run.folder]))[0])
    assert table is not None
    assert (len(table.rows), table.left_out) == (20, 10)
    values = [row.accuracies[0].value for row in table.rows]
    assert values == sorted(values)
    assert (values[0], values[-1]) == (0, 0.75)  # of the ten left out, four are at 0.75 and six at 1


def test_confusions_are_counted_most_frequent_first(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    truth = np.array([0, 0, 0, 0, 3, 3, 3, 5, 5, 1])
    seen = np.array([0, 2, 8, 8, 5, 5, 5, 5, 3, 1])
    columns = {"correct": seen == truth, "prediction": seen, "label": truth}
    facts = measure_cases(run, {"clean": {"role": "clean", "columns": columns}})
    assert [(each.truth, each.predicted, each.count, each.share) for each in confusions(facts)] == [
        ("cat", "dog", 3, 1.0),
        ("airplane", "ship", 2, 0.5),
        ("airplane", "bird", 1, 0.25),
        ("dog", "cat", 1, 0.5),
    ]


def test_costs_are_means_over_the_images(everything: SharedTable) -> None:
    table = cost_table(everything)
    assert table.models == [("parameters", ["696\u00a0k"]), ("multiply-accumulates per image", ["26.4\u00a0M"])]
    assert table.attacks == [("autoattack", [("40", "20", "")])]


def test_costs_have_the_seconds_that_were_timed(tmp_path: Path) -> None:
    passes = {"forwards": np.full(8, 40), "backwards": np.full(8, 20)}
    cases = {
        "clean": {"role": "clean", "columns": {"correct": np.ones(8, bool)}},
        "pgd": {"role": "attack", "columns": {"correct": np.ones(8, bool), **passes}},
    }
    for name, seconds in {"timed": {"clean": 0.5, "pgd": 20.25}, "partly": {"pgd": 0.015}}.items():
        measure_cases(create_run(tmp_path / name, seed=0), cases, seconds=seconds)
    (table,) = shared_tables(read_runs([tmp_path / "timed", tmp_path / "partly"]))
    costs = cost_table(table)
    assert costs.models == [("seconds of measuring, of all workers together", ["166", ""])]
    assert costs.attacks == [("pgd", [("40", "20", "20.2\u00a0s"), ("40", "20", "0.015\u00a0s")])]


def test_differences_are_paired(make_run: MakeRun) -> None:
    """Of one order of the examples: the ten that lie between two thresholds are the only ones that differ."""
    runs = [make_run("a", clean=0.5, robust=0.2), make_run("b", clean=0.55, robust=0.2)]
    (table,) = shared_tables(read_runs(run.folder for run in runs))
    (difference,) = differences(table)
    clean, robust = (difference.by_label[label].difference for label in ("clean", "pgd-20"))
    assert clean.value == pytest.approx(0.05)
    assert 0 < clean.low < clean.high < 0.1  # unpaired, with intervals of ±7 %, zero would be inside
    assert robust.value == 0 and robust.low == -robust.high  # no example changed


def test_differences_have_the_test_and_the_changed_images_of_compare(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("a", clean=0.5, robust=0.2), make_run("b", clean=0.65, robust=0.2)]
    (table,) = shared_tables(read_runs(run.folder for run in runs))
    (difference,) = differences(table)
    expected = compare_models(*(run.folder for run in runs))
    for row in expected.rows:
        found = difference.by_label[row.label]
        assert (found.difference, found.gained.sum(), found.lost.sum(), found.p) == row[5:]
    gained = expected.changed("clean").gained
    assert len(gained) == 30 and expected.rows[0].p is not None
    (clean,) = difference.changed  # under attack both are right on the same images
    assert clean == ("clean", f"{', '.join(map(str, gained[:20]))} …", "none")
    content = report([run.folder for run in runs], tmp_path / "page.html").read_text()
    assert f"<small>30 gained, 0 lost</small><small>p = {expected.rows[0].p:.2g}</small>" in content
    assert f"<dt>clean</dt><dd>gained: {clean.gained}<br>lost: none</dd>" in content


def test_a_waterfall_falls_from_the_clean_accuracy(everything: SharedTable) -> None:
    svg = plots.waterfall(everything.rows[0], "autoattack")
    texts = [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]
    clean, after = above(0.2) / N, [above(0.5) / N, above(0.55) / N]
    falls = [clean - after[0], after[0] - after[1]]
    for expected in [clean, *after]:
        assert f"{100 * expected:.1f}" in texts
    assert [text for text in texts if text.startswith("−")] == [f"−{100 * fall:.1f}" for fall in falls]


@pytest.mark.parametrize("index", [0, 1])
def test_radii_of_linf_are_written_in_grey_levels(everything: SharedTable, index: int) -> None:
    svg = plots.curve_panel(security_curves(everything)[index], 0.1)
    assert ("4/255" in svg) == (index == 0)
    assert ("(ℓ2)" in svg) == (index == 1)

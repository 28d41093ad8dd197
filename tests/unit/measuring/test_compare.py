"""Measured models side by side, from facts with known answers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.cards import write_card

import bastion
from bastion import cli
from bastion.errors import BastionError
from bastion.measuring.compare import compare, compare_facts
from bastion.measuring.facts import Facts, write_measurement
from bastion.measuring.intervals import mean, wilson
from bastion.measuring.measurement import MeasuredAggregate, MeasuredCase, Measurement
from bastion.measuring.order import shuffled
from bastion.measuring.paired import difference_sequence, mcnemar, tango
from bastion.measuring.sampling import confidence_sequence, mean_sequence
from bastion.measuring.store import FactStore
from bastion.run import create_run, environment

DATA = {"name": "tiny", "split": "test", "fingerprint": "f00d", "digest": "d1ge57"}
WORST = {"worst case": MeasuredAggregate(kind="worst", members={"clean": 1.0, "pgd": 1.0})}
MEAN = {"mean": MeasuredAggregate(kind="mean", members={"clean": 1.0, "pgd": 1.0})}
Measured = Callable[..., Facts]


@pytest.fixture
def measured(tmp_path: Path) -> Measured:
    """`measured("robust", clean=[…], pgd=[…])`: a run in the test's folder with these columns of right and wrong."""

    def make(
        name: str, *, questions: dict[str, str] | None = None, specs: dict[str, Any] | None = None, **options: Any
    ) -> Facts:
        columns = {label: np.array(options.pop(label), bool) for label in ("clean", "pgd") if label in options}
        index, identity = options.pop("index", None), options.pop("identity", "identity")
        run, cases = create_run(tmp_path / name, seed=0), []
        for label, column in columns.items():
            store = FactStore(run.facts / identity / (questions or {}).get(label, label))
            rows = {"correct": column, "index": np.arange(len(column)) if index is None else np.array(index)}
            store.write(range(len(column)), rows, {}, {})
            spec = (specs or {}).get(label, {"name": label})
            about = {"store": store.name, "n": len(column), "spec": spec, "columns": tuple(rows)}
            cases.append(MeasuredCase(label=label, kind="probes", role="clean", **about))
        told = {"model": name, "weights": "5eed", "data": DATA, "classes": ("a", "b"), "suite": "demo"}
        told |= {"n": len(column), "aggregates": {}} | environment(0) | options
        return write_measurement(run, Measurement(**told, cases=tuple(cases)))

    return make


def right(n: int, *spans: tuple[int, int]) -> np.ndarray:
    """(n,): true within these spans."""
    column = np.zeros(n, bool)
    for start, stop in spans:
        column[start:stop] = True
    return column


def test_a_comparison_counts_what_changed_each_way(measured: Measured) -> None:
    a = measured("a", clean=right(161, (0, 65)), pgd=right(161, (0, 40)), aggregates=WORST)
    b = measured("b", clean=right(161, (6, 81)), pgd=right(161, (0, 30)), aggregates=WORST)
    comparison = compare_facts([a, b])
    assert [row.label for row in comparison.rows] == ["clean", "pgd", "worst case"]
    clean, pgd, worst = comparison.rows
    assert (clean.model, clean.n, clean.lost, clean.gained) == ("b", 161, 6, 16)
    assert (clean.reference_accuracy, clean.accuracy) == (wilson(65, 161), wilson(75, 161))
    assert clean.difference == tango(16, 6, 161)
    assert clean.p == pytest.approx(0.052479, abs=5e-7)  # the published example of McNemar's test
    assert (pgd.lost, pgd.gained, pgd.p) == (10, 0, mcnemar(10, 0))
    assert (worst.lost, worst.gained) == (16, 0)  # the first 6 are no longer right without the attack


def test_changed_examples_are_told_by_their_index(measured: Measured) -> None:
    index = [30, 10, 20, 50, 40]
    a = measured("a", clean=[1, 1, 0, 0, 1], index=index)
    b = measured("b", clean=[1, 0, 1, 0, 0], index=index)
    changed = compare_facts([a, b]).changed("clean")
    assert (changed.gained.tolist(), changed.lost.tolist()) == ([20], [10, 40])
    with pytest.raises(BastionError, match="no 'pgd' of b was compared; known: 'clean' of b"):
        compare_facts([a, b]).changed("pgd")


def test_different_examples_are_matched_by_index_and_the_rest_is_left_out(measured: Measured) -> None:
    a = measured("a", clean=right(50, (0, 30)))
    b = measured("b", clean=right(20, (0, 10)), index=np.arange(20)[::-1])  # 10 to 19 are right
    comparison = compare_facts([a, b])
    (row,) = comparison.rows
    assert (row.n, row.reference_accuracy.value, row.accuracy.value, row.lost) == (20, 1, 0.5, 10)
    assert comparison.notes == ("a has 50 examples, b 20: compared on the 20 that both have",)


def test_a_mean_of_probes_has_a_paired_normal_interval_and_no_mcnemar_test(measured: Measured) -> None:
    draw = np.random.default_rng(0)
    columns = [draw.random((2, 80)) < 0.5 for _ in range(2)]
    a, b = (measured(n, clean=c[0], pgd=c[1], aggregates=MEAN) for n, c in zip("ab", columns, strict=True))
    row = compare_facts([a, b]).rows[-1]
    assert (row.label, row.p) == ("mean", None)
    assert row.difference == mean(columns[1].mean(0) - columns[0].mean(0))


def test_a_mean_of_probes_that_stopped_early_has_a_sequence_in_the_order_of_measuring(measured: Measured) -> None:
    draw, order = np.random.default_rng(0), shuffled(200)[:80]
    columns = [draw.random((2, 200)) < share for share in (0.4, 0.7)]
    runs = []
    for name, (clean, pgd) in zip("ab", columns, strict=True):
        picked = np.sort(order)
        facts = measured(name, clean=clean[picked], pgd=pgd[picked], index=199 - picked, aggregates=MEAN)
        runs.append(Facts(facts.run, facts.about.model_copy(update={"population": 200}), facts.columns))
    row = compare_facts(runs).rows[-1]
    a, b = (each.mean(0) for each in columns)
    assert row.difference == mean_sequence((b - a)[order], 200, -1, 1)
    assert row.accuracy == runs[1].aggregate("mean") == mean_sequence(b[order], 200)
    assert row.difference.low <= b.mean() - a.mean() <= row.difference.high


def stopped(measured: Measured, name: str, column: np.ndarray, n: int) -> Facts:
    """As if measuring had stopped after n of the examples in random order."""
    picked = np.sort(shuffled(len(column))[:n])
    facts = measured(name, clean=column[picked], index=picked)
    about = facts.about.model_copy(update={"population": len(column)})
    return Facts(facts.run, about, {"clean/correct": column[picked], "clean/index": picked})


def test_a_comparison_of_measurements_that_stopped_early_is_of_all_examples_and_makes_no_test(
    measured: Measured,
) -> None:
    a, b = right(200, (0, 120)), right(200, (40, 140))
    comparison = compare_facts([stopped(measured, "a", a, 60), stopped(measured, "b", b, 90)])
    (row,) = comparison.rows
    first = np.sort(shuffled(200)[:60])
    gained, lost = int((b & ~a)[first].sum()), int((a & ~b)[first].sum())
    assert (row.n, row.gained, row.lost, row.p) == (60, gained, lost, None)
    assert row.accuracy == confidence_sequence(int(b[first].sum()), 60, 200)
    assert row.difference == difference_sequence(gained, lost, 60, 200)
    assert row.difference.low <= b.mean() - a.mean() <= row.difference.high
    assert "b: measuring stopped early, so intervals are about all 200 examples" in comparison.notes[-1]
    whole = compare_facts([measured("c", clean=a), stopped(measured, "d", b, 90)])
    assert (whole.rows[0].n, whole.rows[0].p) == (90, None)


def test_examples_that_all_were_measured_are_compared_as_usual_though_one_stopped_later(measured: Measured) -> None:
    a, b = right(20, (0, 12)), right(200, (4, 140))
    last = int(np.flatnonzero(shuffled(200) < 20)[-1])
    assert last + 1 < 200
    row = compare_facts([measured("a", clean=a), stopped(measured, "b", b, last + 1)]).rows[0]
    assert row.difference == tango(int((b[:20] & ~a).sum()), int((a & ~b[:20]).sum()), 20)


def test_the_first_model_is_the_reference_of_all(measured: Measured) -> None:
    facts = [measured(name, clean=right(40, (0, stop))) for name, stop in (("a", 20), ("b", 25), ("c", 12))]
    comparison = compare(*facts)
    assert (comparison.reference, comparison.models) == ("a", ["b", "c"])
    assert [row.difference.value for row in comparison.rows] == [5 / 40, -8 / 40]
    assert comparison.changed("clean", "c").lost.tolist() == list(range(12, 20))


def test_the_table_says_who_how_many_and_what_changed(measured: Measured) -> None:
    facts = [measured(name, clean=right(40, (0, stop))) for name, stop in (("a", 20), ("b", 26))]
    assert compare(*facts).table().splitlines() == [
        "A: a (reference)",
        "B: b",
        "tiny (test), suite demo, n = 40; accuracies and rates in %",
        "           A      B   B - A     95 % interval  only A  only B      p",
        "clean  50.00  65.00  +15.00  [ +4.92, +29.07]       0       6  0.031",
        "",
        "only A, only B: examples that only this one gets right; p: exact McNemar test",
    ]


def test_probes_with_other_settings_are_left_out_and_named(measured: Measured) -> None:
    a = measured("a", clean=right(9, (0, 5)), pgd=right(9, (0, 3)), aggregates=WORST)
    b = measured("b", clean=right(9, (0, 5)), pgd=right(9, (0, 3)), aggregates=WORST, questions={"pgd": "more steps"})
    comparison = compare_facts([a, b])
    assert [row.label for row in comparison.rows] == ["clean"]
    assert comparison.notes == ("b: not measured with the same settings, so not compared: pgd, worst case",)


def with_columns(measured: Measured, name: str, columns: dict[str, dict[str, np.ndarray]], **about: Any) -> Facts:
    """Facts of these columns by probe, beside those of `clean`."""
    facts = measured(name, clean=right(40, (0, 30)))
    clean = facts.about.cases[0]
    made = {
        label: clean.model_copy(update={"label": label, "store": f"identity/{label}", "columns": (*own, "index")})
        for label, own in columns.items()
    }
    read = {f"{label}/{key}": column for label, own in columns.items() for key, column in own.items()}
    read |= {f"{label}/index": np.arange(40) for label in columns}
    told = facts.about.model_copy(update={"cases": (clean, *made.values()), **about})
    return Facts(facts.run, told, {**facts.columns, **read})


def test_rates_are_compared_by_their_values_per_example(measured: Measured) -> None:
    rate = {"mFR": MeasuredAggregate(kind="sum", members={"tilt": 0.5, "scale": 0.5}, column="flip_rate")}
    flips = [np.arange(40) % 4 / 4, np.arange(40) % 2 / 4]
    a, b = (
        with_columns(measured, name, {each: {"flip_rate": column} for each in ("tilt", "scale")}, aggregates=rate)
        for name, column in zip("ab", flips, strict=True)
    )
    clean, row = compare_facts([a, b]).rows
    assert (clean.label, row.label, row.p) == ("clean", "mFR", None)
    assert (row.reference_accuracy, row.accuracy) == (a.aggregate("mFR"), b.aggregate("mFR"))
    assert row.difference == mean(flips[1] - flips[0])
    assert (row.gained, row.lost) == (0, 20)
    assert compare_facts([a, b]).notes == ()


def test_all_that_is_not_compared_is_named(measured: Measured) -> None:
    phases = {"survived": right(40, (0, 20)), "sampled": right(40, (0, 9)), "lost": right(40)}
    columns = {"two-phase": phases, "near": {"distance": np.ones(40)}, "tilt": {"flip_rate": np.ones(40)}}
    distance = {"mean distance": MeasuredAggregate(kind="mean", members={"near": 1.0}, column="distance")}
    a, b = (with_columns(measured, name, columns, aggregates=distance) for name in "ab")
    comparison = compare_facts([a, b])
    assert [row.label for row in comparison.rows] == ["clean"]
    assert comparison.notes == (
        "b: neither accuracies nor rates of all examples, so not compared: two-phase, near, tilt, mean distance",
    )


def test_doubtful_numbers_are_marked(measured: Measured) -> None:
    a, b = (measured(name, clean=right(9, (0, 5))) for name in "ab")
    doubted = Facts(b.run, b.about, {**b.columns, "clean/warning.zero-gradient": right(9, (0, 9))})
    (note,) = compare_facts([a, doubted]).notes
    assert note.startswith("sanity checks warn about the numbers of b")


CANNOT_BE_COMPARED: dict[str, tuple[dict[str, Any], str]] = {
    "split": (
        {"data": DATA | {"split": "val"}},
        "a was measured on the split test, b on val; measure both on the same",
    ),
    "data set": ({"data": DATA | {"name": "huge"}}, "a was measured on the data set tiny, b on huge"),
    "images": ({"data": DATA | {"digest": "other"}}, "a and b were measured on different images of tiny"),
    "seed": ({"questions": {"clean": "7"}, "seed": 7}, "a was measured with seed 0, b with 7"),
    "settings": (
        {"questions": {"clean": "2"}, "specs": {"clean": {"name": "clean", "crop": 2}}},
        r"'clean' has other settings in b than in a \(crop: None -> 2\); use the same for both",
    ),
    "probes": ({"clean": None, "pgd": [1, 0, 1]}, "nothing in common: a has clean; b has pgd; measure both with the"),
}


@pytest.mark.parametrize("change", CANNOT_BE_COMPARED)
def test_what_cannot_be_compared_is_told_in_a_line(measured: Measured, change: str) -> None:
    options, message = CANNOT_BE_COMPARED[change]
    options = {key: value for key, value in ({"clean": [1, 1, 0]} | options).items() if value is not None}
    a, b = measured("a", clean=[1, 1, 0]), measured("b", **options)
    with pytest.raises(BastionError, match=message):
        compare_facts([a, b])


def test_runs_are_found_by_their_folders(measured: Measured) -> None:
    a, b = measured("a", clean=right(40, (0, 20))), measured("b", clean=right(40, (0, 26)))
    comparison = bastion.compare(a.run.folder, str(b.run.folder))
    assert comparison == compare_facts([a, b])


def test_of_several_measurements_the_largest_that_is_shared_is_taken(measured: Measured) -> None:
    a = [measured("a", clean=right(n, (0, 5))) for n in (20, 60)][-1]
    b = [measured("b", clean=right(n, (0, 5))) for n in (60, 20)][-1]
    measured("a", clean=right(100, (0, 5)), data=DATA | {"name": "huge"})
    (row,) = compare(a.run.folder, b.run.folder).rows
    assert row.n == 60


def test_of_several_models_in_a_run_the_one_measured_last_is_compared_and_a_note_says_so(measured: Measured) -> None:
    """Though it has fewer examples: the other one is of earlier code."""
    a = measured("a", clean=right(60, (0, 5)))
    measured("b", clean=right(60, (0, 50)), identity="before", created="2026-01-01")
    b = measured("b", clean=right(20, (0, 10)), identity="after", created="2026-01-02")
    comparison = compare(a.run.folder, b.run.folder)
    assert [(row.n, row.accuracy.value) for row in comparison.rows] == [(20, 0.5)]
    assert comparison.notes[-1].startswith("b: ") and "has facts of several models" in comparison.notes[-1]


def test_of_several_shared_suites_one_must_be_chosen(measured: Measured) -> None:
    for suite, stop in (("demo", 5), ("other", 7)):
        a, b = (measured(name, clean=right(stop + 9, (0, stop)), suite=suite) for name in "ab")
    with pytest.raises(BastionError, match="all were measured with demo, other; choose one with --suite"):
        compare(a.run.folder, b.run.folder)
    assert compare(a.run.folder, b.run.folder, suite="other").rows[0].n == 16
    with pytest.raises(BastionError, match="a: not measured with the suite 'demos'; did you mean 'demo'?"):
        compare(a.run.folder, b.run.folder, suite="demos")


def test_facts_of_earlier_weights_are_not_compared(measured: Measured) -> None:
    a, b = measured("a", clean=[1, 0]), measured("b", clean=[1, 0])
    write_card(b.run, "beef")
    with pytest.raises(BastionError, match="b: not measured yet; run `bastion measure .*b --suite demo` first"):
        compare(a.run.folder, b.run.folder)


def test_a_zoo_model_is_found_where_measuring_puts_its_facts(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bastion.measuring.find import default_folder
    from bastion.models.checkpoint import read_card
    from bastion.models.load import locate

    monkeypatch.chdir(tmp_path)
    a = measured("a", clean=[1, 0, 1])
    with pytest.raises(BastionError, match="zoo/cifar10-linf-vit: not measured yet; run `bastion measure zoo/"):
        compare("a", "zoo/cifar10-linf-vit")
    weights = read_card(locate("zoo/cifar10-linf-vit")).weights
    measured(default_folder("cifar10-linf-vit", weights).as_posix(), clean=[1, 1, 1], model="vit")
    assert compare("a", "zoo/cifar10-linf-vit").rows == compare_facts([a, *_all(tmp_path / "runs")]).rows


def _all(folder: Path) -> list[Facts]:
    from bastion.measuring.facts import read_measurements
    from bastion.run import Run

    return [facts for run in folder.iterdir() for facts in read_measurements(Run(run))]


def test_models_of_one_name_are_told_apart(measured: Measured) -> None:
    facts = [measured(name, clean=[1, 0, 1], model="vit") for name in "abc"]
    assert (compare(*facts).reference, compare(*facts).models) == ("a", ["b", "c"])
    assert compare(facts[0], facts[0]).models == ["vit (2)"]


def test_the_command_prints_the_table_plain_when_piped_and_in_80_columns_on_a_terminal(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = [
        measured(name, clean=right(1000, (0, stop)), pgd=right(1000, (0, 9)), aggregates=WORST)
        for name, stop in (("a", 20), ("b", 995))
    ]
    monkeypatch.setattr(sys, "argv", ["bastion", "compare", *(str(each.run.folder) for each in facts)])

    def printed() -> str:
        with pytest.raises(SystemExit, match="0"):
            cli.main()
        return capsys.readouterr().out

    assert printed() == compare(*facts).table() + "\n"
    monkeypatch.setattr(cli, "stdout", Console(force_terminal=True, width=80, no_color=True, highlight=False))
    lines = re.sub(r"\x1b\[\d*m", "", printed()).splitlines()
    plain = compare(*facts).table().splitlines()
    assert [line.split() for line in lines] == [line.split() for line in plain]  # nothing is wrapped or cut


def test_one_model_is_not_compared(measured: Measured) -> None:
    with pytest.raises(BastionError, match="give two or more measured models"):
        compare(measured("a", clean=[1]))

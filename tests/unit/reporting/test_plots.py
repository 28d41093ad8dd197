from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from made_runs import MakeRun, train_run

from bastion.reporting import plots, svg, training
from bastion.reporting.tables import SharedTable, read_runs, shared_tables
from bastion.run import create_run


def table_of(make_run: MakeRun, **changes: str) -> SharedTable:
    runs = [
        make_run("robust", clean=0.47, robust=0.265, **changes),
        make_run("standard", clean=0.55, robust=0, **changes),
    ]
    return shared_tables(read_runs(run.folder for run in runs))[0]


def drawn_at(svg: str, mark: int) -> list[float]:
    """The x of every marker that is filled with this run's colour."""
    return [float(x) for x in re.findall(rf'<use href="[^"]+" x="([\d.]+)"[^>]*fill: var\(--run-{mark}\)', svg)]


def test_every_dot_stands_at_its_accuracy(make_run: MakeRun) -> None:
    chart = plots.accuracy_chart(table_of(make_run), 760)
    left, right = 6, 760 - 52  # of 0 % and 100 %
    expected = {0: [47.0, 26.5, 26.5], 1: [55.0, 0.0, 0.0]}
    for mark, accuracies in expected.items():
        assert drawn_at(chart, mark) == pytest.approx([left + x / 100 * (right - left) for x in accuracies], abs=1e-3)


def test_charts_take_every_colour_from_the_page(make_run: MakeRun) -> None:
    chart = plots.accuracy_chart(table_of(make_run), 760)
    assert not re.search(r"#[0-9a-f]{6}", chart)
    assert {"--ink", "--muted", "--line", "--paper", "--run-0", "--run-1"} == set(
        re.findall(r"var\((--[\w-]+)\)", chart)
    )


def test_the_ids_of_a_chart_are_its_own_even_if_it_is_on_a_page_twice(make_run: MakeRun) -> None:
    chart = plots.accuracy_chart(table_of(make_run), 760)
    charts = re.findall("<svg .*?</svg>", svg.with_unique_ids(f"<p>{chart}\n{chart}</p>"), re.DOTALL)
    ids = [re.findall(r'\bid="([^"]+)"', each) for each in charts]
    assert len({*ids[0], *ids[1]}) == 2 * len(ids[0])
    for each, own in zip(charts, ids, strict=True):
        assert {name for pair in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', each) for name in pair} <= {"", *own}


@pytest.mark.parametrize("label", ["$x^$ & <script>", "攻撃", "#000001"])
def test_any_label_can_be_drawn(make_run: MakeRun, label: str) -> None:
    chart = plots.accuracy_chart(table_of(make_run, label=label), 760)
    assert label.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in chart


def test_training_panels_hold_what_was_logged(tmp_path: Path) -> None:
    robust, standard = (train_run(tmp_path / name, robust=value) for name, value in (("robust", 0.2), ("standard", 0)))
    loss, clean, attacked = training.training_panels(read_runs([robust.folder, standard.folder]))
    assert "training loss" in loss
    assert len(drawn_at(clean, 0)) == len(drawn_at(clean, 1)) == 12  # validations
    assert len(drawn_at(attacked, 0)) == 12
    assert "var(--run-1)" not in attacked  # standard training attacks nothing


def test_a_run_without_a_log_has_no_panels(tmp_path: Path) -> None:
    assert training.training_panels(read_runs([create_run(tmp_path / "run", seed=0).folder])) == []


def test_losses_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    for step, loss in enumerate([2.0, float("nan"), float("inf"), 1.0]):
        run.log({"kind": "step", "step": step, "epoch": step / 4, "loss": loss})
    (run,) = read_runs([run.folder])
    (curve,) = training.curves([run], "loss", None, 1)
    assert (curve.epochs.tolist(), curve.values.tolist()) == ([0, 0.75], [2.0, 1.0])


def test_a_long_curve_is_averaged_in_equal_stretches() -> None:
    epochs, values = training.averaged(np.arange(3000.0), np.arange(3000.0) % 10)
    assert (values == 4.5).all()
    assert epochs.tolist() == [10 * stretch + 4.5 for stretch in range(training.POINTS)]

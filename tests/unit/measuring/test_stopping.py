"""When enough examples are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.measuring.test_runner import SUITE

from bastion import BastionError, storage
from bastion.measuring.facts import read_measurements
from bastion.measuring.intervals import wilson
from bastion.measuring.order import shuffled
from bastion.measuring.runner import measure, measure_shard
from bastion.measuring.sampling import confidence_sequence
from bastion.measuring.stopping import NOTE, Limits, Tally, surviving
from bastion.measuring.table import until_the_end
from bastion.models import Classifier
from bastion.run import open_run
from bastion.types import DataSet


@pytest.fixture
def ask(tiny_model: Classifier, tiny_data: DataSet, tmp_path: Path) -> Any:
    def ask(**options: Any) -> Any:
        settings = {"data": tiny_data, "suite": SUITE, "folder": tmp_path / "run", "batch_size": 8, **options}
        return measure(tiny_model, **settings)

    return ask


def test_a_narrow_interval_stops_at_the_first_batch_that_has_it() -> None:
    tally = Tally(shuffled(1000), ["clean"])
    limits = Limits(tally, 50, until=0.2, budget=None)
    right = np.ones(1000, bool)
    stopped = None
    for batch in range(20):
        positions = np.sort(tally.order[50 * batch : 50 * batch + 50])
        tally.add("clean", positions, right[positions])
        if stopped is None and limits.is_narrow():
            stopped = 50 * (batch + 1)
    widths = {n: tally.intervals(n)["clean"] for n in range(50, 1001, 50)}
    assert stopped == min(n for n, each in widths.items() if each.high - each.low <= 0.2)
    assert limits.count() == stopped < 1000  # though everything has been measured since


def test_batches_that_come_early_do_not_count_before_those_in_front_of_them() -> None:
    tally = Tally(np.arange(100), ["a", "b"])
    tally.add("a", np.arange(100), np.ones(100, bool))
    tally.add("b", np.arange(50, 100), None)
    assert tally.complete() == 0
    tally.add("b", np.arange(20), None)
    assert tally.complete() == 20


def test_a_bar_tells_how_many_are_right_and_an_interval_that_holds_if_one_may_stop() -> None:
    tally = Tally(shuffled(100), ["clean", "distance", "corrupted type=gaussian_noise severity=5"])
    tally.add("clean", shuffled(100)[:20], np.arange(20) < 15)
    tally.add("corrupted type=gaussian_noise severity=5", np.arange(4), np.arange(4) < 4)
    tally.add("distance", np.arange(20), None)
    fixed, stops = wilson(15, 20), confidence_sequence(15, 20, 100)
    assert tally.note("clean", stops=False) == f"clean 15/20 75.0 % [{100 * fixed.low:.1f}, {100 * fixed.high:.1f}]"
    assert tally.note("clean", stops=True) == f"clean 15/20 75.0 % [{100 * stops.low:.1f}, {100 * stops.high:.1f}]"
    assert tally.note("distance", stops=False) == "distance"
    assert surviving("autoattack eps=8/255", 9, 128) == "autoattack 8/255: 9 of 128 survive"
    long = tally.note("corrupted type=gaussian_noise severity=5", stops=False)
    assert long.startswith("corrupted gauss… 4/4 100.0 % [") and len(long) == NOTE


def test_a_measurement_that_stopped_is_about_all_examples_and_goes_on_later(ask: Any, tmp_path: Path) -> None:
    stopped = ask(until=0.7)
    assert stopped.n < 40 == stopped.about.population
    assert stopped.n % 8 == 0
    assert f"stopped after {stopped.n} of 40 examples in random order" in stopped.table()
    whole = ask(folder=tmp_path / "whole")
    picked = np.sort(shuffled(40)[: stopped.n])
    assert np.array_equal(stopped.correct("pgd"), whole.correct("pgd")[picked])
    assert np.array_equal(stopped.columns["pgd/index"], whole.columns["pgd/index"][picked])
    for label, each in stopped.accuracies().items():
        assert each.high - each.low <= 0.7
        assert each.low <= whole.accuracies()[label].value <= each.high
    further = ask(until=0.3)
    assert stopped.n < further.n < 40
    assert len(read_measurements(open_run(tmp_path / "run"))) == 1  # in the place of the first
    ended = ask(until=1e-9)
    assert ended.n == 40 and ended.about.population is None
    assert ended.numbers() == whole.numbers()
    assert until_the_end(ended, 1e-9).startswith(
        "all 40 examples are measured; intervals are now about the image distribution"
    )
    assert until_the_end(ended, 0.99) == until_the_end(further, 1e-9) == ""
    assert len(read_measurements(open_run(tmp_path / "run"))) == 1


@pytest.mark.processes
def test_where_it_stops_does_not_depend_on_the_number_of_workers(ask: Any, tmp_path: Path) -> None:
    alone, together = ask(until=0.5), ask(until=0.5, workers=3, folder=tmp_path / "three")
    assert alone.n == together.n < 40
    assert alone.numbers() == together.numbers()


def test_a_budget_that_is_too_short_says_so_and_loses_nothing(ask: Any) -> None:
    with pytest.raises(BastionError, match="the budget ended before every probe had measured a first batch"):
        ask(budget=1e-9)
    assert ask(budget=10).n == 40


@pytest.mark.parametrize("option", [{"until": 0}, {"until": "a"}, {"budget": -1}, {"budget": float("inf")}])
def test_limits_that_are_none_are_refused(ask: Any, option: dict[str, Any]) -> None:
    with pytest.raises(BastionError, match="must be a number above 0"):
        ask(**option)


def test_shards_together_are_the_whole(ask: Any, tiny_model: Classifier, tiny_data: DataSet, tmp_path: Path) -> None:
    options: dict[str, Any] = {"folder": tmp_path / "run", "batch_size": 8}
    assert measure_shard(tiny_model, tiny_data, SUITE, shard="2/3", **options)[1:] == (0, 6)  # of ten batches
    assert measure_shard(tiny_model, tiny_data, SUITE, shard="1/3", **options)[1:] == (0, 3)
    assert measure_shard(tiny_model, tiny_data, SUITE, shard="3/3", **options)[1:] == (0, 0)
    whole = ask(folder=tmp_path / "whole")
    assert ask().numbers() == whole.numbers()


def test_every_shard_has_a_share_of_every_probe(tiny_model: Classifier, tiny_data: DataSet, tmp_path: Path) -> None:
    measure_shard(tiny_model, tiny_data, SUITE, shard="1/2", folder=tmp_path / "run", batch_size=8)
    files = list((tmp_path / "run" / "facts").rglob("*.safetensors"))
    assert len({path.parent for path in files}) == len(files) == 2  # one for each probe
    sizes = [len(storage.read_arrays(path)[0]["position"]) for path in files]
    assert sorted(sizes) == [16, 24]  # of five batches of eight


def test_a_study_is_finished_before_narrow_intervals_count(ask: Any) -> None:
    ask(until=0.7)
    suite = {**SUITE.resolved(), "studies": {"cost": "complexity"}}
    facts = ask(suite=suite, until=0.7)
    assert facts.studies()["cost"]["parameters"] == [267]
    assert facts.n < 40


def test_there_must_be_an_interval_to_become_narrow(ask: Any) -> None:
    distances = {"probes": {"far": {"name": "distortion", "norm": "linf"}}}
    with pytest.raises(BastionError, match="until: no probe of this suite has an accuracy"):
        ask(suite=distances, until=0.1)
    phased = {"probes": {"a": {"name": "two-phase", "threat": {"norm": "linf", "eps": 0.1}, "share": 0.5}}}
    with pytest.raises(BastionError, match="until: a two-phase estimate has an interval of its own"):
        ask(suite=phased, until=0.1)
    with pytest.raises(BastionError, match="until: the width of an interval, such as 0.02 for two points, got 2"):
        ask(until=2)


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/2/3"])
def test_a_shard_has_a_number_and_a_count(tiny_model: Classifier, tiny_data: DataSet, shard: str) -> None:
    with pytest.raises(BastionError, match="expected NUMBER/COUNT, such as 2/8"):
        measure_shard(tiny_model, tiny_data, SUITE, shard=shard)

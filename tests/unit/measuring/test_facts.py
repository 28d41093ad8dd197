"""What facts amount to, from columns with known answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from torch import Tensor, nn

from bastion import storage
from bastion.errors import BastionError
from bastion.forward import predict
from bastion.measuring import table
from bastion.measuring.facts import Facts, read_measurements
from bastion.measuring.intervals import bounded_mean, mean
from bastion.measuring.measurement import MeasuredAggregate, MeasuredCase, Measurement
from bastion.measuring.runner import measure
from bastion.models import Classifier
from bastion.run import Run, environment
from bastion.settings import settings
from bastion.types import Batch, DataSet, Fact, Probe


def facts_of(columns: dict[str, Any], **aggregates: MeasuredAggregate) -> Facts:
    """`facts_of({"near/distance": […]}, total=…)`: in memory."""
    arrays = {name: np.array(column) for name, column in columns.items()}
    n = len(next(iter(arrays.values())))
    names: dict[str, list[str]] = {}
    for label, _, name in (key.partition("/") for key in arrays):
        names.setdefault(label, []).append(name)
    cases = tuple(
        MeasuredCase(
            label=label, kind="probes", role="attack", store=f"id/{label}", n=n, spec={"norm": "l2"}, columns=tuple(own)
        )
        for label, own in names.items()
    )
    about = {"model": "m", "weights": "w", "classes": ("a", "b"), "suite": "s", "n": n, "aggregates": aggregates}
    data = {"name": "tiny", "split": "test", "fingerprint": "f"}
    return Facts(Run(Path("nowhere")), Measurement(**environment(0), **about, data=data, cases=cases), arrays)


DISTANCES = {"near/distance": [0.5, 1.0, np.inf, 0.0], "far/distance": [1.5, np.inf, np.inf, 1.0]}


@pytest.mark.parametrize(
    ("kind", "weights", "expected"),
    [("mean", {"near": 1.0, "far": 1.0}, [1.0, 0.5]), ("sum", {"near": 1.0, "far": -1.0}, [-1.0, -1.0])],
)
def test_an_aggregate_leaves_out_examples_without_a_finite_number_and_says_so(
    kind: str, weights: dict[str, float], expected: list[float]
) -> None:
    facts = facts_of(DISTANCES, total=MeasuredAggregate(kind=kind, members=weights, column="distance"))
    assert np.array_equal(facts.aggregate_column("total"), [expected[0], np.nan, np.nan, expected[1]], equal_nan=True)
    assert facts.aggregate("total") == mean(np.array(expected))
    told = facts.table()
    assert "note: total: without 2 of 4 examples, whose 'distance' is not finite" in told
    assert told.splitlines()[1].split()[:2] == ["total", f"{np.mean(expected):.4g}"]  # a distance is no percentage
    assert f"total {np.mean(expected):.4g} [" in repr(facts)
    assert f"<td>{np.mean(expected):.4g}</td>" in table.html(facts)


def test_in_one_line_and_in_a_notebook_numbers_have_intervals_and_two_phase_estimates_their_name() -> None:
    phases = {"survived": np.arange(40) < 20, "sampled": np.arange(40) < 10, "lost": np.arange(40) < 1}
    columns = {f"{label}/{name}": column for label in ("aa", "two-phase-aa") for name, column in phases.items()}
    facts = facts_of({"clean/correct": np.arange(40) < 30, **columns})
    low, high = (f"{100 * each:.2f}" for each in facts.two_phase("aa").population[1:3])
    assert repr(facts) == (
        f"<m on tiny, n = 40: clean 75.00 % [59.81, 85.81], aa (two-phase estimate) 45.00 % [{low}, {high}], "
        f"two-phase-aa 45.00 % [{low}, {high}]>"
    )
    row = f"<tr><td>aa (two-phase estimate)</td><td></td><td>45.00 %</td><td>[{low}, {high}]</td></tr>"
    assert row in facts._repr_html_()


def test_a_sample_of_survivors_that_is_too_small_is_told_with_the_share_that_would_do() -> None:
    """300 of 1,000 survive and nothing is lost: 30 % of them leave 0.8 points open, 45 % half a point."""
    example = np.arange(1000)

    def told(sampled: int) -> str:
        phases = {"survived": example < 300, "sampled": example < sampled, "lost": example < 0}
        return facts_of({f"aa/{name}": column for name, column in phases.items()}).table()

    note = "note: aa: 0.80 points wide because a sample of the survivors was attacked; a share of 0.45 of them makes it"
    assert note in told(90)
    assert "note" not in told(135)


def test_aggregates_of_right_and_wrong_are_of_every_example() -> None:
    columns = {"a/correct": [True, True, False, False], "b/correct": [True, False, True, False]}
    weights = {"a": 0.5, "b": 2.0}
    facts = facts_of(
        columns,
        worst=MeasuredAggregate(kind="worst", members=weights),
        mean=MeasuredAggregate(kind="mean", members=weights),
        errors=MeasuredAggregate(kind="errors", members=weights),
    )
    assert facts.aggregate_column("worst").tolist() == [True, False, False, False]
    assert facts.aggregate_column("mean").tolist() == [1, 0.5, 0.5, 0]
    assert facts.aggregate_column("errors").tolist() == [0, 2, 0.5, 2.5]
    assert not table.left_out(facts)


@settings
class Logits(Probe):
    """Its columns are called what other probes call theirs, and declare nothing."""

    facts: ClassVar[Mapping[str, str | Fact]] = {"distance": "of the logits from 0", "confidence": "the largest logit"}

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        logits = predict(model, batch)
        return {"distance": logits.norm(dim=1), "confidence": 10 * logits.amax(1)}


@settings
class Declared(Probe):
    """Its columns have names of their own, and declare what they are."""

    facts: ClassVar[Mapping[str, str | Fact]] = {
        "radius": Fact("of the logits from 0", "distance"),
        "sure": Fact("probability of the predicted class", "share"),
        "right": Fact("probability of the label", "accuracy"),
    }
    role = "attack"

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        logits = predict(model, batch)
        sure = logits.softmax(1)
        return {"radius": logits.norm(dim=1), "sure": sure.amax(1), "right": sure[range(len(sure)), batch.y]}


def measured(probe: Probe, columns: list[str], model: Classifier, data: DataSet, folder: Path) -> Facts:
    aggregates = {f"mean {column}": {"mean": ["own"], "column": column} for column in columns}
    return measure(model, data, {"probes": {"own": probe}, "aggregates": aggregates}, limit=16, folder=folder)


def test_a_column_is_what_its_probe_declares_whatever_its_name(
    tiny_model: Classifier, tiny_data: DataSet, tmp_path: Path
) -> None:
    own = measured(Logits(), ["confidence"], tiny_model, tiny_data, tmp_path / "own")
    assert own.aggregate("mean confidence") == mean(own.columns["own/confidence"])
    assert "%" not in own.table() and "median distance" not in own.table()
    with pytest.raises(BastionError, match="'own' has no minimal distances"):
        own.curve("own", [0.1])

    declared = measured(Declared(), ["sure", "right"], tiny_model, tiny_data, tmp_path / "declared")
    assert declared.aggregate("mean sure") == bounded_mean(declared.columns["own/sure"].astype(float), 0.0, 1.0)
    assert list(declared.accuracies()) == ["mean right"]
    assert list(declared.errors()) == ["mean sure"]
    radii = declared.columns["own/radius"]
    assert f"median distance {np.median(radii):.4g}, 0 not fooled" in declared.table()
    assert declared.curve("own", [1.0])[1.0].value == np.mean(radii > 1)
    assert declared.case("own").meanings["sure"] == "probability of the predicted class"


def test_a_declared_share_outside_of_0_and_1_is_refused(
    tiny_model: Classifier, tiny_data: DataSet, tmp_path: Path
) -> None:
    @settings
    class Wrong(Logits):
        facts: ClassVar[Mapping[str, str | Fact]] = {"confidence": Fact("the largest logit", "share")}

    message = "probe 'own': 'confidence' is declared as share, but has values from .* a share lies between 0 and 1"
    with pytest.raises(BastionError, match=message):
        measured(Wrong(), ["confidence"], tiny_model, tiny_data, tmp_path)


def test_measurements_from_before_probes_declared_columns_go_by_their_names(
    tiny_model: Classifier, tiny_data: DataSet, tmp_path: Path
) -> None:
    facts = measured(Logits(), ["confidence"], tiny_model, tiny_data, tmp_path)
    (path,) = facts.run.measurements.iterdir()
    content = storage.read_json(path)
    del content["cases"][0]["kinds"], content["aggregates"]["mean confidence"]["column_kind"]
    storage.write_json(path, content)
    (old,) = read_measurements(facts.run)
    assert old.aggregate("mean confidence") == bounded_mean(old.columns["own/confidence"].astype(float), 0.0, 1.0)
    assert "median distance" in old.table()

"""A security curve from one search per example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import Linear
from tests.oracles import nearest

from bastion import BastionError
from bastion.measuring.facts import Facts
from bastion.measuring.runner import measure
from bastion.types import DataSet

QUICK = {"name": "minimal", "fab_steps": 30, "bisections": 2, "steps": 10}
RADII = [0.01, 0.03, 0.1]


@pytest.fixture
def measured(tiny_data: DataSet, tmp_path: Path) -> tuple[Facts, np.ndarray]:
    """A linear model, right on most images, and the true distances."""
    weight = torch.zeros(3, 3, 8, 8)
    for colour in range(3):
        weight[colour, colour] = 0.3
    model = Linear(
        weight.flatten(1) + 0.02 * torch.randn(3, 192, generator=torch.Generator().manual_seed(0)), torch.zeros(3)
    )
    suite: dict[str, Any] = {
        "probes": {"clean": "accuracy", "distance": {"name": "distortion", "norm": "linf", "attack": QUICK}},
        "curves": {"distance": RADII},
    }
    facts = measure(model, tiny_data, suite, folder=tmp_path / "run")
    return facts, nearest("linf", model, tiny_data.test.batch(range(40))).numpy()


def test_the_curve_is_that_of_the_true_distances(measured: tuple[Facts, np.ndarray]) -> None:
    facts, true = measured
    radii = [0.0, *np.quantile(true, [0.2, 0.5, 0.8]).tolist(), 1.0]
    curve = facts.curve("distance", radii)
    assert curve[0.0].value == np.mean(true > 0) == facts.accuracies()["clean"].value
    assert curve[1.0].value == 0 and curve[1.0].high > 0 and curve[1.0].n == 40
    for radius, found in curve.items():  # distances found are at most 2 % too long
        assert np.mean(true > radius) <= found.value <= np.mean(1.02 * true + 1e-6 > radius)


def test_the_radii_of_the_suite_are_rows_of_the_table(measured: tuple[Facts, np.ndarray]) -> None:
    facts, _ = measured
    assert facts.case("distance").radii == tuple(RADII)
    rows = [line for line in facts.table().splitlines() if line.startswith("  at")]
    assert [line.split()[3] for line in rows] == ["0.01", "0.03", "0.1"]
    assert [float(line.split()[4]) for line in rows] == [
        round(100 * each.value, 2) for each in facts.curve("distance", RADII).values()
    ]


def test_probes_without_smallest_distances_have_no_curve(measured: tuple[Facts, np.ndarray]) -> None:
    with pytest.raises(BastionError, match="'clean' has no minimal distances"):
        measured[0].curve("clean", RADII)

"""Two phases find on the sample just what the whole ensemble finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bastion import BastionError
from bastion.attacks import Threat
from bastion.attacks.apgd import APGD
from bastion.attacks.ensemble import Ensemble
from bastion.attacks.pgd import PGD
from bastion.attacks.square import Square
from bastion.measuring.runner import measure
from bastion.measuring.worker import Worker
from bastion.models import Classifier
from bastion.probes.adversarial import Adversarial
from bastion.probes.two_phase import TwoPhase
from bastion.reporting.html import report
from bastion.types import DataSet

THREAT = Threat("linf", 0.05)
ATTACK = Ensemble(members=(PGD(steps=1), APGD(steps=2), Square(queries=60)))  # weak ones first: the last has work left


def test_on_the_sample_it_is_the_whole_ensemble(tiny_model: Classifier, tiny_data: DataSet) -> None:
    batch = tiny_data.test.batch(range(40))
    whole = Adversarial(THREAT, ATTACK)(tiny_model.eval(), batch, seed=3)
    phases = TwoPhase(THREAT, 0.5, ATTACK)(tiny_model, batch, seed=3)
    survived, sampled, lost = (phases[name] for name in ("survived", "sampled", "lost"))
    assert 0 < sampled.sum() < survived.sum()
    right = survived & ~lost
    assert right[sampled].equal(whole["correct"][sampled])
    assert (~survived & whole["correct"]).sum() == 0
    assert phases["fooled_by"][~survived | sampled].equal(whole["fooled_by"][~survived | sampled])
    everybody = TwoPhase(THREAT, 1.0, ATTACK)(tiny_model, batch, seed=3)
    assert (everybody["survived"] & ~everybody["lost"]).equal(whole["correct"])
    assert everybody["forwards"].sum() >= whole["forwards"].sum()


def test_who_is_sampled_depends_on_seed_and_index_alone(tiny_model: Classifier, tiny_data: DataSet) -> None:
    probe, batch = TwoPhase(THREAT, 0.5, ATTACK), tiny_data.test.batch(range(40))
    whole = probe(tiny_model.eval(), batch, seed=0)["sampled"]
    some = torch.arange(3, 40, 7)
    assert probe(tiny_model, batch.select(some), seed=0)["sampled"].equal(whole[some])
    assert not probe(tiny_model, batch, seed=1)["sampled"].equal(whole)


def test_it_takes_as_many_batches_at_once_as_make_the_sample_one(
    tiny_model: Classifier, tiny_data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for images that are large. Nobody else's batches change, and every example is measured once."""
    spec: dict[str, Any] = {"name": "two-phase", "threat": {"norm": "linf", "eps": 0.05}, "share": 0.3}
    suite = {"probes": {"clean": "accuracy", "phased": spec}}
    sizes: list[list[int]] = []
    monkeypatch.setattr(Worker, "open_tasks", lambda self, tasks: sizes.append([len(t.positions) for t in tasks]) or [])
    with pytest.raises(BastionError, match="facts are missing"):
        measure(tiny_model, tiny_data, suite, folder=tmp_path / "run", batch_size=8)
    monkeypatch.setattr("bastion.measuring.worker.MOST_BYTES", 2 * 8 * 4 * 3 * 8 * 8)  # two batches
    with pytest.raises(BastionError, match="facts are missing"):
        measure(tiny_model, tiny_data, suite, folder=tmp_path / "run", batch_size=8)
    assert sizes == [[8, 24, 8, 8, 8, 16, 8], [8, 16, 8, 8, 16, 8, 8, 8]]


def test_the_second_phase_needs_a_member(tiny_model: Classifier, tiny_data: DataSet) -> None:
    batch = tiny_data.test.batch(range(4))
    with pytest.raises(BastionError, match="the attack has 0 members under linf"):
        TwoPhase(THREAT, 0.5, PGD())(tiny_model, batch, seed=0)
    with pytest.raises(BastionError, match="the first 3 are for every example"):
        TwoPhase(THREAT, 0.5, ATTACK, 3)(tiny_model, batch, seed=0)


def test_a_table_names_both_phases_and_the_interval(tiny_model: Classifier, tiny_data: DataSet, tmp_path: Path) -> None:
    spec: dict[str, Any] = {"name": "two-phase", "threat": {"norm": "linf", "eps": 0.05}, "share": 0.4}
    members = [{"name": "pgd", "steps": 1}, {"name": "apgd", "steps": 2}, {"name": "square", "queries": 60}]
    spec["attack"] = {"name": "ensemble", "members": members}
    facts = measure(tiny_model, tiny_data, {"probes": {"phased": spec}}, folder=tmp_path / "run")
    estimate = facts.two_phase("phased")
    survived, sampled, lost = (facts.columns[f"phased/{name}"] for name in ("survived", "sampled", "lost"))
    expected = survived.mean() * (1 - lost.sum() / sampled.sum())
    assert np.isclose(estimate.value, expected) and estimate.low <= expected <= estimate.high
    table = facts.table()
    assert f"two-phase: {sampled.sum()} of {survived.sum()} survivors sampled, {lost.sum()} lost" in table
    assert facts.numbers()["phased"].value == estimate.value
    assert "phased" not in facts.accuracies()
    page = report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert f"{100 * estimate.value:.1f}" in page and "phased" in page

"""Measurements as bastion 0.1.0 stored them stay readable."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from bastion import BastionError, storage
from bastion.measuring.convert import convert
from bastion.measuring.facts import read_measurements
from bastion.run import Run

ABOUT = {
    "created": "2026-01-01T00:00:00+00:00",
    "command": "bastion measure",
    "seed": 0,
    "versions": {"bastion": "0.1.0"},
    "machine": {"cores": 2},
    "weights": "ab" * 32,
    "device": "cpu",
    "data": {"name": "tiny", "fingerprint": "f00d"},
    "split": "test",
    "block": 4,
    "batch": 4,
    "model": "old",
    "classes": ["a", "b"],
    "suite": "demo",
    "n": 8,
    "probes": {"clean": "0" * 16, "pgd": "1" * 16},
    "described": {"clean": "Accuracy()", "pgd": "Adversarial(...)"},
    "threats": {"pgd": {"norm": "linf", "eps": 0.1}},
    "members": {},
}


def old_run(folder: Path) -> Run:
    run = Run(folder)
    run.measurements.mkdir(parents=True)
    (run.measurements / "demo-12345678.json").write_text(json.dumps(ABOUT))
    for label, name in ABOUT["probes"].items():
        (run.facts / name).mkdir(parents=True)
        (run.facts / name / "probe.json").write_text("{}")
        for start in (0, 4):
            index = np.arange(start, start + 4)
            facts = {"index": index, "label": index % 2, "correct": index < (6 if label == "clean" else 3)}
            if label == "pgd":
                facts |= {"in_budget": index >= 0}
                pictures = {"clean": np.zeros((4, 3, 2, 2), np.float32), "index": index}
                _write(run.facts / name / f"pictures-{start:07d}-{start + 4:07d}.safetensors", pictures)
            _write(run.facts / name / f"facts-{start:07d}-{start + 4:07d}.safetensors", facts)
    return run


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    path.write_bytes(safetensors.numpy.save(arrays, {"sha256": storage.digest(arrays)}))


def test_an_old_measurement_is_converted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = old_run(tmp_path / "run")
    convert(run)
    assert "converted from an earlier version: 1 of its measurements" in " ".join(capsys.readouterr().err.split())
    (facts,) = read_measurements(run)
    assert {name: each.value for name, each in facts.accuracies().items()} == {
        "clean": 0.75,
        "pgd": 0.375,
        "worst case": 0.375,
    }
    assert [case.role for case in facts.about.cases] == ["clean", "attack"]
    assert facts.pictures("pgd")["position"].tolist() == list(range(8))
    assert sorted(path.name for path in run.facts.iterdir()) == ["before-abababab"]
    convert(run)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["/tmp", "..", "../../elsewhere", "0" * 15, "f" * 16])
def test_folders_that_are_not_this_runs_facts_are_left_alone(tmp_path: Path, name: str) -> None:
    """Old measurements have no checksum: a path in one may be anything."""
    run = old_run(tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "facts-0.safetensors").write_text("precious")
    (path,) = run.measurements.iterdir()
    path.write_text(json.dumps(ABOUT | {"probes": {"clean": name}}))
    with pytest.raises(BastionError, match="not a measurement .no facts"):
        convert(run)
    assert (elsewhere / "facts-0.safetensors").read_text() == "precious"
    assert path.is_file()


def test_a_measurement_whose_facts_are_not_all_there_stays_as_it_is(tmp_path: Path) -> None:
    run = old_run(tmp_path / "run")
    next((run.facts / ("0" * 16)).glob("facts-*")).unlink()
    with pytest.raises(BastionError, match="4 of 8 facts are missing"):
        convert(run)
    assert len(list(run.measurements.iterdir())) == 1

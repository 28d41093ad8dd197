"""Real processes, really interrupted: what was stopped and resumed equals what was not, bit for bit."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import ADVERSARIAL, QUICK

from bastion.training.trainer import train

pytestmark = pytest.mark.xdist_group("resume")  # its fixtures are made once

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
SETS = [word for change in (*QUICK, *ADVERSARIAL, "schedule.epochs=4", "ema=0.9") for word in ("--set", change)]
SUITE = """
probes:
  clean: accuracy
  pgd:
    name: adversarial
    threat: {norm: linf, eps: 8/255}
    attack: {name: pgd, steps: 10}
"""


def bastion(*words: str) -> list[str]:
    return [sys.executable, "-m", "bastion", *words]


def run(*words: str) -> str:
    result = subprocess.run(bastion(*words), env=ENV, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def digests(folder: Path, pattern: str) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob(pattern)) if path.is_file()]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def stopped(words: list[str], number: int, when: Callable[[], bool]) -> int:
    """Start, wait until `when`, send the signal; the exit code."""
    process = subprocess.Popen(words, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 120
    while not when() and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.005)
    process.send_signal(number)
    return process.wait(timeout=120)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run("train", "base/micro", *SETS, "--run", str(folder))
    return folder


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_training_stopped_by_a_signal_ends_with_the_same_weights(
    whole: Path, tmp_path: Path, number: int, code: int
) -> None:
    folder = tmp_path / "run"
    words = bastion("train", "base/micro", *SETS, "--run", str(folder))

    def in_the_middle() -> bool:
        log = folder / "log.jsonl"
        return log.is_file() and len(log.read_text().splitlines()) >= 5

    assert stopped(words, number, in_the_middle) == code
    assert not (folder / "checkpoints" / "step-000000012.safetensors").exists()
    run("train", "base/micro", *SETS, "--run", str(folder), "--resume")
    for pattern, count in {"model/*.safetensors": 1, "checkpoints/*": 2}.items():
        assert len(digests(whole, pattern)) == count
        assert digests(folder, pattern) == digests(whole, pattern)
    assert not list(folder.rglob("*.tmp"))


def test_a_corruption_model_comes_through_a_kill_with_the_same_bits(tmp_path: Path) -> None:
    """RSPC's own network, its momentum and its file beside the model, after SIGKILL."""
    changes = (*QUICK, "objective={name: rspc, corruption_lr: 0.1}", "schedule.epochs=4", "checkpoint.minutes=1e-9")
    whole = train("base/micro", changes=changes, folder=tmp_path / "whole")
    folder = tmp_path / "run"
    sets = [word for change in changes for word in ("--set", change)]

    def in_the_middle() -> bool:
        return (folder / "checkpoints" / "step-000000005.safetensors").exists()

    assert stopped(bastion("train", "base/micro", *sets, "--run", str(folder)), signal.SIGKILL, in_the_middle) == -9
    assert not (folder / "checkpoints" / "step-000000012.safetensors").exists()
    train("base/micro", changes=changes, folder=folder, resume=True)
    for pattern in ("model/*.safetensors", "checkpoints/*"):
        assert len(digests(whole.folder, pattern)) == 2
        assert digests(folder, pattern) == digests(whole.folder, pattern)


def measure(model: Path, suite: Path, folder: Path, *more: str) -> list[str]:
    return bastion(
        "measure",
        str(model),
        "--suite",
        str(suite),
        "--run",
        str(folder),
        "--limit",
        "300",
        "--batch-size",
        "20",
        *more,
    )


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("suite") / "suite.yaml"
    path.write_text(SUITE)
    return path


@pytest.fixture(scope="module")
def measured(whole: Path, suite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured") / "run"
    subprocess.run(measure(whole, suite, folder, "--workers", "1"), env=ENV, check=True, capture_output=True)
    return folder


def test_one_worker_equals_two_bit_for_bit(whole: Path, suite: Path, measured: Path, tmp_path: Path) -> None:
    subprocess.run(measure(whole, suite, tmp_path / "run", "--workers", "2"), env=ENV, check=True, capture_output=True)
    facts = digests(tmp_path / "run", "facts/**/*.*")
    assert len(facts) == 3  # two probes, and what they were asked of
    assert facts == digests(measured, "facts/**/*.*")


@pytest.mark.parametrize(
    ("number", "workers"),
    [(signal.SIGTERM, "2"), pytest.param(signal.SIGKILL, "2", marks=pytest.mark.slow), (signal.SIGKILL, "1")],
)
def test_measuring_stopped_by_a_signal_goes_on_to_the_same_facts(
    whole: Path, suite: Path, measured: Path, tmp_path: Path, number: int, workers: str
) -> None:
    folder = tmp_path / "run"
    words = measure(whole, suite, folder, "--workers", workers)
    assert stopped(words, number, lambda: len(list(folder.rglob("facts/*/*/*.safetensors"))) >= 18) == (
        143 if number == signal.SIGTERM else -9
    )
    time.sleep(0.5)  # orphans of a killed parent end by themselves
    assert 18 <= len(digests(folder, "facts/*/*/*.safetensors")) < 30
    subprocess.run(words, env=ENV, check=True, capture_output=True)
    assert digests(folder, "facts/**/*.*") == digests(measured, "facts/**/*.*")


@pytest.mark.slow
def test_another_thread_count_changes_only_rounding(whole: Path, suite: Path, measured: Path, tmp_path: Path) -> None:
    """Two threads through the API: the same draws, and flags that agree but for rounding."""
    code = """
import sys, torch, numpy as np
from pathlib import Path
from bastion.measuring import runner
from bastion.measuring.facts import read_measurements
from bastion.run import open_run
single = torch.set_num_threads
torch.set_num_threads = lambda n: single(2)
facts = runner.measure(sys.argv[1], suite=sys.argv[2], folder=sys.argv[3], limit=300, batch_size=20)
assert torch.get_num_threads() == 2
(other,) = read_measurements(open_run(sys.argv[4]))
agree = np.mean([facts.correct(label) == other.correct(label) for label in facts.labels])
assert agree >= 0.995, agree
"""
    words = [sys.executable, "-c", code, str(whole), str(suite), str(tmp_path / "run"), str(measured)]
    subprocess.run(words, check=True, env=ENV)

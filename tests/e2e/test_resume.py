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
from tests.warm import Started

from bastion.training.trainer import train

CHANGES = (*QUICK, *ADVERSARIAL, "schedule.epochs=4", "ema=0.9")
SUITE = """
probes:
  clean: accuracy
  pgd:
    name: adversarial
    threat: {norm: linf, eps: 8/255}
    attack: {name: pgd, steps: 10}
"""


class Bastion:
    """`bastion` as processes of their own."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    def start(self, words: list[str]) -> Started:
        with open(os.devnull, "r+b") as nothing:
            return Started(self.socket, *words, files=(nothing.fileno(), nothing.fileno(), 2))

    def run(self, words: list[str]) -> None:
        assert self.start(words).wait() == 0

    def stop(self, words: list[str], number: int, when: Callable[[], bool]) -> int:
        """Start, wait until `when`, send the signal; the exit code."""
        process = self.start(words)
        limit = time.monotonic() + 300
        while not when() and process.is_running() and time.monotonic() < limit:
            time.sleep(0.01)
        os.kill(process.pid, number)
        return process.wait()


@pytest.fixture(scope="session")
def bastion(warm: Path) -> Bastion:
    return Bastion(warm / "socket")


def sets(changes: tuple[str, ...]) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def digests(folder: Path, pattern: str) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob(pattern)) if path.is_file()]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def whole(bastion: Bastion, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    bastion.run(["train", "base/micro", *sets(CHANGES), "--run", str(folder)])
    return folder


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_training_stopped_by_a_signal_ends_with_the_same_weights(
    bastion: Bastion, whole: Path, tmp_path: Path, number: int, code: int
) -> None:
    folder = tmp_path / "run"
    words = ["train", "base/micro", *sets(CHANGES), "--run", str(folder)]

    def in_the_middle() -> bool:
        log = folder / "log.jsonl"
        return log.is_file() and len(log.read_text().splitlines()) >= 5

    assert bastion.stop(words, number, in_the_middle) == code
    assert not (folder / "checkpoints" / "step-000000012.safetensors").exists()
    bastion.run([*words, "--resume"])
    for pattern, count in {"model/*.safetensors": 1, "checkpoints/*": 2}.items():
        assert len(digests(whole, pattern)) == count
        assert digests(folder, pattern) == digests(whole, pattern)
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.slow  # units stop it by an exception and compare the same files
def test_a_corruption_model_comes_through_a_kill_with_the_same_bits(bastion: Bastion, tmp_path: Path) -> None:
    """RSPC's own network, its momentum and its file beside the model, after SIGKILL."""
    changes = (*QUICK, "objective={name: rspc, corruption_lr: 0.1}", "schedule.epochs=4", "checkpoint.minutes=1e-9")
    whole = train("base/micro", changes=changes, folder=tmp_path / "whole")
    folder = tmp_path / "run"

    def in_the_middle() -> bool:
        return (folder / "checkpoints" / "step-000000005.safetensors").exists()

    words = ["train", "base/micro", *sets(changes), "--run", str(folder)]
    assert bastion.stop(words, signal.SIGKILL, in_the_middle) == -9
    assert not (folder / "checkpoints" / "step-000000012.safetensors").exists()
    train("base/micro", changes=changes, folder=folder, resume=True)
    for pattern in ("model/*.safetensors", "checkpoints/*"):
        assert len(digests(whole.folder, pattern)) == 2
        assert digests(folder, pattern) == digests(whole.folder, pattern)


def measure(model: Path, suite: Path, folder: Path, workers: str) -> list[str]:
    named = {"suite": suite, "run": folder, "limit": 300, "batch-size": 20, "workers": workers}
    return ["measure", str(model), *(word for name, value in named.items() for word in (f"--{name}", str(value)))]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("suite") / "suite.yaml"
    path.write_text(SUITE)
    return path


@pytest.fixture(scope="module")
def measured(bastion: Bastion, whole: Path, suite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured") / "run"
    bastion.run(measure(whole, suite, folder, "1"))
    return folder


@pytest.mark.parametrize(
    ("number", "code", "workers"),
    [
        (signal.SIGTERM, 143, "1"),
        pytest.param(signal.SIGTERM, 143, "2", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -9, "2", marks=pytest.mark.slow),
        (signal.SIGKILL, -9, "1"),
    ],
)
def test_measuring_stopped_by_a_signal_goes_on_to_the_facts_of_one_worker(
    bastion: Bastion, whole: Path, suite: Path, measured: Path, tmp_path: Path, number: int, code: int, workers: str
) -> None:
    folder = tmp_path / "run"
    words = measure(whole, suite, folder, workers)
    assert bastion.stop(words, number, lambda: len(list(folder.rglob("facts/*/*/*.safetensors"))) >= 18) == code
    time.sleep(0.5)  # orphans of a killed parent end by themselves
    assert 18 <= len(digests(folder, "facts/*/*/*.safetensors")) < 30
    bastion.run(words)
    assert len(digests(measured, "facts/**/*.*")) == 3  # two probes, and what they were asked of
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
    subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

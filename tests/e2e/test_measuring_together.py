"""Processes of torchrun share out a measurement, and one that is killed changes no bit of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bastion.measuring.facts import Facts, read_measurements
from bastion.run import open_run

pytestmark = pytest.mark.processes

MEASURE = ["measure", "zoo/cifar10-linf-vit", "--limit", "48", "--batch-size", "4", "--workers", "1"]

# Rank 1 kills itself in its second batch, the first time that it is started; every batch leaves a line.
SCRIPT = """
import os, signal, sys
from bastion.cli import main
from bastion.measuring.worker import Worker
plain, done = Worker.__call__, []
def watched(self, task):
    done.append(task)
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and len(done) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    right = plain(self, task)
    with open(os.environ["DONE"], "a") as file:
        file.write(f"{os.environ['RANK']} {task.key}\\n")
    return right
Worker.__call__ = watched
main()
"""


def launch(*words: str, **env: str) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    result = subprocess.run(
        [*torchrun, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def measured(folder: Path) -> Facts:
    (facts,) = read_measurements(open_run(folder))
    return facts


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    folder = tmp_path_factory.mktemp("alone") / "run"
    command = [sys.executable, "-m", "bastion", *MEASURE, "--run", str(folder)]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    return measured(folder)


def test_two_processes_of_which_one_is_killed_measure_what_one_does(alone: Facts, tmp_path: Path) -> None:
    script, done = tmp_path / "script.py", tmp_path / "done"
    script.write_text(SCRIPT)
    told = launch(str(script), *MEASURE, "--dir", str(tmp_path / "run"), DONE=str(done))
    together = measured(tmp_path / "run")
    assert told.count("worst case") == 1  # one of them speaks
    assert together.numbers() == alone.numbers()
    for name in alone.columns:
        assert together.columns[name].tobytes() == alone.columns[name].tobytes(), name
    tasks = [line.split(maxsplit=1) for line in done.read_text().splitlines()]
    keys = [key for _, key in tasks]
    assert len(keys) == len(set(keys)) == 3 * 12  # each of three probes' batches once
    assert {rank for rank, _ in tasks} == {"0", "1"}


def test_both_stop_when_an_interval_is_narrow(alone: Facts, tmp_path: Path) -> None:
    words = [*MEASURE, "--until", "0.4"]
    launch("-m", "bastion", *words, "--dir", str(tmp_path / "two"))
    command = [sys.executable, "-m", "bastion", *words, "--run", str(tmp_path / "one")]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    one, two = measured(tmp_path / "one"), measured(tmp_path / "two")
    assert one.n == two.n < 48
    assert one.numbers() == two.numbers()

"""Processes of torchrun share out a measurement, and one that is killed changes no bit of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bastion.measuring.facts import Facts, read_measurements
from bastion.measuring.runner import measure
from bastion.models import checkpoint
from bastion.run import open_run

pytestmark = [pytest.mark.processes]

MODEL = {"name": "vit/micro", "stem": [8, 16], "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 10}
LIMITS = {"limit": 48, "batch_size": 4}
UNTIL = 0.4

# Two measurements, one after the other. In the second one rank 1 kills itself in its second batch, the first time that
# it is started, and rank 0 waits for that after its first; every batch of that one leaves a line. On two machines, only
# that of rank 1 counts the restart.
SCRIPT = """
import json, os, pathlib, signal, sys, time
from bastion.cli import main
from bastion.measuring.worker import Worker

first, second = json.loads(os.environ["COMMANDS"])

def run(words):
    sys.argv = ["bastion", *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise

run(first)
plain, done, killed = Worker.__call__, [], pathlib.Path(os.environ["DONE"] + ".killed")
def watched(self, task):
    done.append(task)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and len(done) == 2:
        if os.environ["RANK"] == "1":
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while not killed.exists():
            time.sleep(0.02)
    right = plain(self, task)
    with open(os.environ["DONE"], "a") as file:
        file.write(f"{os.environ['RANK']} {task.key}\\n")
    return right
Worker.__call__ = watched
run(second)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    checkpoint.save(checkpoint.build(MODEL, mean=(0.5,) * 3, std=(0.25,) * 3), folder)
    return folder


@pytest.fixture(scope="module", params=[1, 2], ids=["one machine", "two machines"])
def together(
    request: pytest.FixtureRequest,
    model: Path,
    torchrun: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Both measurements by two processes."""
    folder = tmp_path_factory.mktemp("together")
    (folder / "script.py").write_text(SCRIPT)
    words = ["measure", str(model), "--limit", str(LIMITS["limit"]), "--batch-size", str(LIMITS["batch_size"])]
    commands = [
        [*words, "--until", str(UNTIL), "--dir", str(folder / "until")],
        [*words, "--dir", str(folder / "killed")],
    ]
    env = {"COMMANDS": json.dumps(commands), "DONE": str(folder / "done")}
    told = torchrun(folder / "script.py", machines=request.param, restarts=2, **env)
    (folder / "told").write_text(told)
    return folder


def measured(folder: Path) -> Facts:
    (facts,) = read_measurements(open_run(folder))
    return facts


def test_two_processes_of_which_one_is_killed_measure_what_one_does(
    model: Path, together: Path, tmp_path: Path
) -> None:
    alone, both = measure(model, folder=tmp_path, **LIMITS), measured(together / "killed")
    assert both.numbers() == alone.numbers()
    for name in alone.columns:
        assert both.columns[name].tobytes() == alone.columns[name].tobytes(), name
    tasks = [line.split(maxsplit=1) for line in (together / "done").read_text().splitlines()]
    keys = [key for _, key in tasks]
    assert len(keys) == len(set(keys)) == 3 * 12  # each of three probes' batches once
    assert {rank for rank, _ in tasks} == {"0", "1"}


def test_both_stop_when_an_interval_is_narrow(model: Path, together: Path, tmp_path: Path) -> None:
    one, two = measure(model, until=UNTIL, folder=tmp_path, **LIMITS), measured(together / "until")
    assert one.n == two.n < LIMITS["limit"]
    assert one.numbers() == two.numbers()


def test_one_of_them_speaks(together: Path) -> None:
    """Of each measurement; of the one that is whole, again after the restart."""
    assert (together / "told").read_text().count("on cifar10-mini (test), suite demo") == 3

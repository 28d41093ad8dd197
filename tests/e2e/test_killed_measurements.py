"""Measurements of the shipped suites, killed ten times at random: their facts are those of one that was left alone."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bastion.measuring.facts import Facts, read_measurements
from bastion.run import open_run

pytestmark = [pytest.mark.slow, pytest.mark.processes]

KILLS = 10
ATTACKS = "[{name: apgd-ce, steps: 5}, {name: apgd-t, steps: 5}, {name: fab-t, steps: 3}, {name: square, queries: 60}]"
SUITES = {  # with smaller attacks
    "corruptions": [],
    "perturbations": [],
    "radius": ["probes.distance.attack={name: fab, steps: 5, keep: nearest}"],
    "autoattack-two-phase-linf": [
        f"probes.autoattack-two-phase.attack={{name: ensemble, members: {ATTACKS}}}",
        "share=0.5",
    ],
}

# Forks of one process, which has imported everything and never computed a gradient, so that each starts at once.
SCRIPT = """
import json, os, random, signal, sys, time, traceback
from bastion.measuring.runner import measure
from bastion.models import checkpoint

suites, kills, folder = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
chance = random.Random(0)
model = {"name": "vit/micro", "num_classes": 10, "stem": [8, 16], "embed_dim": 16, "depth": 1, "num_heads": 2}
checkpoint.save(checkpoint.build(model, mean=(0.5,) * 3, std=(0.25,) * 3), f"{folder}/model", {})

def start(suite, name, workers=1):
    child = os.fork()
    if child == 0:
        try:
            options = {"changes": suites[suite], "limit": 24, "batch_size": 4, "workers": workers}
            measure(f"{folder}/model", "cifar10-mini", suite, folder=f"{folder}/{name}/{suite}", **options)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child

def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

alive = {}
for suite in suites:
    began = time.monotonic()
    assert ended(start(suite, "alone")) == 0
    seconds = time.monotonic() - began
    codes = []
    for _ in range(kills):
        child = start(suite, "killed")
        time.sleep(chance.uniform(0, 0.15 * seconds))
        os.kill(child, signal.SIGKILL)
        codes.append(ended(child))
    alive[suite] = codes.count(-9)
    assert ended(start(suite, "killed")) == 0
    assert ended(start(suite, "together", workers=3)) == 0
print(json.dumps(alive))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """The folder, and how often each suite was killed before its end."""
    folder = tmp_path_factory.mktemp("killed")
    words = [sys.executable, "-c", SCRIPT, json.dumps(SUITES), str(KILLS), str(folder)]
    done = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted((folder / "facts").rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def facts_of(folder: Path) -> Facts:
    (facts,) = read_measurements(open_run(folder))
    return facts


@pytest.mark.parametrize("suite", SUITES)
def test_ten_kills_and_three_workers_change_no_byte(measured: tuple[Path, dict[str, int]], suite: str) -> None:
    folder, killed = measured
    assert killed[suite] >= KILLS / 2
    alone = digests(folder / "alone" / suite)
    assert len(alone) > 2
    for other in ("killed", "together"):
        assert digests(folder / other / suite) == alone
        assert facts_of(folder / other / suite).numbers() == facts_of(folder / "alone" / suite).numbers()

"""Processes that start at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import warm as server


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `bastion` that needs no time to start, and the socket behind it; one for all workers of xdist."""
    distributed = "PYTEST_XDIST_WORKER" in os.environ
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if distributed else base) / "warm"
    try:
        folder.mkdir()
    except FileExistsError:
        pass
    else:
        _serve(folder, watched=os.getppid() if distributed else os.getpid())
    limit = time.monotonic() + 120
    while not (folder / "socket").exists():
        assert time.monotonic() < limit
        time.sleep(0.05)
    return folder


def _serve(folder: Path, *, watched: int) -> None:
    socket, command = folder / "socket", folder / "bin" / "bastion"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -S {server.__file__} {socket} "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "WATCHED": str(watched), "OMP_NUM_THREADS": "1"}
    os.posix_spawn(sys.executable, [sys.executable, server.__file__, str(socket)], environment)


# What torchrun runs, with processes that are forked instead of started.
LAUNCH = """
import runpy
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def run():
    runpy.run_path({script!r}, run_name="__main__")

config = LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="tests", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
    max_restarts={restarts}, start_method="fork",
)
elastic_launch(config, run)()
"""


@pytest.fixture(scope="session")
def torchrun(warm: Path) -> Callable[..., str]:
    """Run a script by two processes as `torchrun --standalone --nproc-per-node=2` does; what they print."""

    def launch(script: Path, *, restarts: int = 0, **env: str) -> str:
        words = [str(warm / "bin" / "bastion"), "-c", LAUNCH.format(script=str(script), restarts=restarts)]
        done = subprocess.run(
            words, env={**os.environ, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return launch

"""Processes that start at once."""

from __future__ import annotations

import os
import socket
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
    min_nodes={machines}, max_nodes={machines}, nproc_per_node=2 // {machines}, run_id="tests", rdzv_backend="c10d",
    rdzv_endpoint="localhost:{port}", max_restarts={restarts}, start_method="fork",
)
elastic_launch(config, run)()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def torchrun(warm: Path) -> Callable[..., str]:
    """Run a script by two processes, of one torchrun or of one on each of two machines; what they print."""

    def launch(script: Path, *, machines: int = 1, restarts: int = 0, **env: str) -> str:
        port = free_port() if machines > 1 else 0
        code = LAUNCH.format(script=str(script), machines=machines, port=port, restarts=restarts)
        agents = [
            subprocess.Popen(
                [str(warm / "bin" / "bastion"), "-c", code],
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(machines)
        ]
        try:
            printed = [agent.communicate(timeout=300) for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
        assert not any(agent.returncode for agent in agents), "\n".join(errors for _, errors in printed)
        return "".join(output for output, _ in printed)

    return launch

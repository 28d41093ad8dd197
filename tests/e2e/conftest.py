"""Processes that start at once."""

from __future__ import annotations

import os
import sys
import time
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

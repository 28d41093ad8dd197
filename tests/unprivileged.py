"""Tests of what may not be read: root may read everything, so they run as nobody."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def folder_for_all() -> Iterator[Path]:
    """A folder that everybody may enter; pytest's own are for one user."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@contextmanager
def closed(path: Path) -> Iterator[None]:
    """Nobody may read this file or list this folder, and this process is nobody."""
    mode, user = path.stat().st_mode, os.geteuid()
    path.chmod(0)
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(0)
        path.chmod(mode)

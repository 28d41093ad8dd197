from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import measure_run, train_run

from bastion.run import Run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """`make_run("robust", clean=0.47, robust=0.265)`: a trained and measured run in the test's folder."""

    def make(name: str, *, clean: float, robust: float, **changes: Any) -> Run:
        run = train_run(tmp_path / name, robust=robust)
        measure_run(run, clean=clean, robust=robust, **changes)
        return run

    return make

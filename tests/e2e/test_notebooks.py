"""Notebooks run from top to bottom, and what is stored of their output is small and of the same form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def outputs(cell: Any) -> list[str]:
    """What a reader sees: printed text, and pictures."""
    removed_bar = {"text/plain": ""}
    said = [each for each in cell.get("outputs", ()) if each.get("name") != "stderr"]
    said = [each for each in said if each.get("data") != removed_bar]
    return ["text" if "text" in each else "picture" for each in said]


@pytest.mark.processes
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    stored = json.loads(path.read_text())
    run = nbformat.read(path, as_version=4)
    NotebookClient(run, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [outputs(cell) for cell in run.cells] == [outputs(cell) for cell in stored["cells"]]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_is_small(path: Path) -> None:
    assert path.stat().st_size < 100_000

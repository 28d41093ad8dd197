from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder in place of the user's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("BASTION_DATA", str(folder))
    return folder

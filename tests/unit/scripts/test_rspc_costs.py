"""The table of what a step of RSPC costs is that of the stored results."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import rspc


def test_the_table_of_the_page_is_that_of_the_stored_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = rspc.PAGE.read_text()
    assert all(f"| {way} |" in written for way in rspc.WAYS)
    monkeypatch.setattr(rspc, "PAGE", tmp_path / "training.md")
    rspc.PAGE.write_text(written)
    rspc.write_page(rspc.RESULTS.read_text())
    assert rspc.PAGE.read_text() == written

"""The commands and examples of README and docs run as they stand.

Blocks marked `sh` are run, `python` and `yaml` blocks with a file name behind the mark are written to that file, and
other `python` blocks are run, all in one folder per page and in order. Blocks marked otherwise are for reading.
The processes are forked from one that has imported torch already (`tests/warm.py`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bastion import recipe_yaml

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "docs/tour.md",
    "docs/training.md",
    "docs/extend.md",
    "docs/sanity.md",
    "docs/suites.md",
    "docs/report.md",
    "docs/attacks.md",
    "docs/costs.md",
    "docs/intervals.md",
    "docs/measuring.md",
    "docs/corruptions.md",
    "docs/interpretability.md",
    "docs/occlusion.md",
    "docs/weights-and-loss.md",
    "docs/generalization.md",
    "docs/data.md",
    "docs/coming-from.md",
    "docs/jacobian.md",
    "docs/models.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "howto").glob("*.md")),
]
BLOCK = re.compile(r"^```(\w+)(?: +(\S+))?\n(.*?)^```$", re.M | re.S)

LONG = {"docs/sanity.md"}


def _blocks(page: str) -> list[tuple[str, str, str]]:
    """Language, file name and content."""
    return BLOCK.findall((ROOT / page).read_text())


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in LONG else []) for page in PAGES]
)
def test_the_page_runs(page: str, tmp_path: Path, warm: Path) -> None:
    own = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{warm / 'bin'}:{own}:{os.environ['PATH']}", "COLUMNS": "120"}
    ran = 0
    for language, name, content in _blocks(page):
        if name:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
            continue
        command = {"sh": ["bash", "-euc", content], "python": [str(warm / "bin" / "bastion"), "-c", content]}.get(
            language
        )
        if command:
            result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
            assert result.returncode == 0, f"{page}:\n{content}\n{result.stderr}"
            ran += 1
    assert ran
    if "report.html" in (ROOT / page).read_text():
        assert list(tmp_path.rglob("report.html"))


def test_every_page_with_commands_is_run() -> None:
    pages = ["README.md", *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
    runnable = {page for page in pages if any(language in ("sh", "python") for language, _, _ in _blocks(page))}
    assert runnable <= {*PAGES}


def test_every_yaml_block_can_be_read() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for language, _, content in _blocks(page.relative_to(ROOT).as_posix()):
            assert language != "yaml" or recipe_yaml.read(content, str(page))

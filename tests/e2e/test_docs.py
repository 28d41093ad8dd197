"""The commands and examples of README and docs run as they stand.

Blocks marked `sh` are run, `python` and `yaml` blocks with a file name behind the mark are written to that file, and
other `python` blocks are run, all in one folder per page and in order. Blocks marked otherwise are for reading.
The processes are forked from one that has imported torch already (`tests/warm.py`), but for the README's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
]
BLOCK = re.compile(r"^```(\w+)(?: +(\S+))?\n(.*?)^```$", re.M | re.S)

LONG = {"docs/sanity.md"}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in LONG else []) for page in PAGES]
)
def test_the_page_runs(page: str, tmp_path: Path, warm: Path) -> None:
    own = Path(sys.executable).parent
    first, python = (own, [sys.executable]) if page == "README.md" else (warm / "bin", [str(warm / "bin" / "bastion")])
    env = {**os.environ, "PATH": f"{first}:{own}:{os.environ['PATH']}", "COLUMNS": "120"}
    ran = 0
    for language, name, content in BLOCK.findall((ROOT / page).read_text()):
        if name:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
            continue
        command = {"sh": ["bash", "-euc", content], "python": [*python, "-c", content]}.get(language)
        if command:
            result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
            assert result.returncode == 0, f"{page}:\n{content}\n{result.stderr}"
            ran += 1
    assert ran
    if "report.html" in (ROOT / page).read_text():
        assert list(tmp_path.rglob("report.html"))


@pytest.mark.parametrize("page", [*PAGES, "docs/architecture.md", "docs/models.md", "docs/recipes.md", "docs/trust.md"])
def test_links_between_pages_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), target

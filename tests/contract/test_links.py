"""The documentation hangs together: pages are in the site's navigation, links lead to a page and a heading."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts import reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
CODE = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s]+)\)")


def in_navigation(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from in_navigation(inner)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them, and the site too."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_has_its_place_in_the_navigation() -> None:
    listed = list(in_navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted(
        written | reference.COPIES.keys() | reference.NOTEBOOKS.keys() | reference.PAGES.keys()
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    for target in LINK.findall(CODE.sub("", page.read_text())):
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target

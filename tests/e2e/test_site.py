"""The documentation site: it builds without a warning, names every plug-in, and needs no network and no server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.browser import needs_chromium, opened

from bastion.listing import listed

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.processes]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="the site needs the extra `docs`: `make docs` installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.parametrize("kind", ["attacks", "objectives", "probes", "studies", "data", "loggers"])
def test_every_plugin_has_an_entry(kind: str, site: Path) -> None:
    page = (site / "reference" / f"{kind}.html").read_text()
    entries = set(re.findall(r'<h2 id="([^"]+)"', page))
    assert {name for name, *_ in listed(kind)} <= entries


def test_what_a_plugin_is_told_of_is_on_the_page(site: Path) -> None:
    attacks, python = ((site / "reference" / f"{name}.html").read_text() for name in ("attacks", "python"))
    assert "gradients are averaged over this many passes" in attacks
    assert 'id="bastion.evaluate"' in python and "misclassified; clean mistakes count, at distance 0" in python


def test_pages_ask_for_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|iframe)[^>]*src="([^"]+)"|<link[^>]*href="([^"]+)"', page.read_text())
        assert not [each for each in fetched if re.match("(https?:)?//", "".join(each))], page


@needs_chromium
def test_the_site_can_be_searched_as_files(site: Path, tmp_path: Path) -> None:
    with opened(tmp_path / "profile") as tab:
        tab.open(site / "index.html")
        tab.click("input.md-search__input")
        tab.type("momentum iterative")
        found = "document.querySelectorAll('.md-search-result__item').length"
        tab.run(f"new Promise((done) => setInterval(() => {found} && done(), 50))")
        assert "mi-fgsm" in tab.run("document.querySelector('.md-search-result__list').innerText")
        assert [address for address in tab.requests() if not address.startswith("file:")] == []
        assert tab.complaints() == []

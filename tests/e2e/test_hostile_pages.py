"""Pages about runs whose names, classes, labels, paths and logs are attacks: nothing runs, and no request leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.browser import Tab, needs_chromium, opened

from bastion.errors import printable
from bastion.measuring.runner import measure
from bastion.models import Classifier
from bastion.reporting.html import report
from bastion.reporting.leaderboard import leaderboard
from bastion.run import open_run
from bastion.types import DataSet

pytestmark = needs_chromium
# None has a slash: folders and labels may not. The last is what a terminal or a parser of XML stumbles over.
ATTACKS = (
    "<img src=http:x.example onerror=owned=1>",
    "\"'><svg onload=owned=2>",
    "<style>@import 'http:x.example';*{background:url(http:x.example)}",
    "javascript:owned=3",
    "{{ owned }} {% raw %} ${owned} $\\mathrm{x}$ ]]> --> &lt;script&gt;",
    "\x1b[2J\x00\x08\u202e\x85\udcff",
)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with opened(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def runs(tmp_path: Path, tiny_data: DataSet, tiny_model: Classifier) -> Path:
    for number, attack in enumerate(ATTACKS):
        data = replace(tiny_data, name=attack, classes=tuple(f"{attack}{each}" for each in "abc"))
        label = printable(attack)
        probes = {label: "accuracy", f"{label} again": {"name": "accuracy", "role": "corruption"}}
        suite = {"probes": probes, "aggregates": {f"{label} worst": {"worst": [label]}}}
        folder = tmp_path / "runs" / f"{number}{attack}".replace("\0", "")
        measure(tiny_model, data, suite, folder=folder, limit=8)
        run = open_run(folder)
        run.log({"kind": "event", "step": 1, "message": attack})
        run.log({"kind": "step", "step": 1, "epoch": 1, "loss": 1.0, attack: attack})
        (folder / "report.html").write_text("of another page")
    return tmp_path / "runs"


def test_text_of_strangers_does_nothing_in_a_browser(tab: Tab, runs: Path, tmp_path: Path) -> None:
    report(sorted(runs.iterdir()), tmp_path / "report.html")
    leaderboard(runs, tmp_path / "leaderboard.html")
    for name in ("report.html", "leaderboard.html"):
        content = (tmp_path / name).read_text()
        assert printable(content) == content
        tab.open(tmp_path / name)
        assert tab.run("typeof owned") == "undefined"
        assert tab.complaints() == tab.requests() == []
        shown = tab.run("document.body.textContent")
        assert all(attack in shown for attack in ATTACKS[: 5 if name == "report.html" else 1]), name
        links = tab.run("[...document.links].map((link) => link.protocol)")
        assert set(links) <= {"file:", "about:", "blob:"}

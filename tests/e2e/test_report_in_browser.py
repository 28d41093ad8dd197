"""The report as a browser shows it: wide, narrow, dark and printed, of facts that the real runner measured."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.browser import Tab, needs_chromium, opened

from bastion.measuring.runner import measure
from bastion.models import Classifier
from bastion.reporting.html import report
from bastion.run import open_run
from bastion.types import DataSet

pytestmark = [needs_chromium]
HEIGHT = 2600
LINF = {"norm": "linf", "eps": 0.05}
PGD = {"name": "pgd", "steps": 3}
SUITE = {
    "axes": {"eps": {"set": ["probes.curve.threat.eps"], "to": [0.01, 0.03]}},
    "probes": {
        "clean": "accuracy",
        "pgd-3": {"name": "adversarial", "threat": LINF, "attack": PGD},
        "curve": {"name": "adversarial", "threat": LINF, "attack": PGD},
        "distance": {"name": "distortion", "norm": "linf", "attack": {"name": "minimal", "steps": 2}},
        "foggy": {"name": "accuracy", "role": "corruption"},
        "noisy": {"name": "accuracy", "role": "corruption"},
        "occlusion": {"name": "occlusion", "masks": 3, "size": 4},
        "patches": {"name": "patch-confidence", "size": 4},
        "delta": {"name": "perturbation", "attack": PGD},
    },
    "studies": {"size": "complexity"},
}
SECTIONS = [
    *("accuracy", "security", "distances", "corruptions", "analysis"),
    *("classes", "pictures", "training", "cost", "details"),
]

FACTS = """(() => {
  const style = (element) => getComputedStyle(element);
  const box = (element) => { const b = element.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  return {
    overflow: document.documentElement.scrollWidth - innerWidth,
    unseen: [...document.images].filter((image) => image.naturalWidth === 0).length,
    images: document.images.length,
    crisp: [...document.images].every((image) => style(image).imageRendering === "pixelated"),
    background: style(document.body).backgroundColor,
    run: style(document.querySelector(".mark")).color,
    charts: [...document.querySelectorAll("svg")].map(box).filter((b) => b[2] > b[0]),
    sections: [...document.querySelectorAll("section")].map((section) => section.id),
  };
})()"""

# Boxes of words, and of dotted lines, in the chart of accuracies that is shown.
WORDS_AND_LINES = """(() => {
  const shown = [...document.querySelectorAll("#accuracy svg")].find((svg) => svg.getBoundingClientRect().width > 0);
  const box = (element) => { const b = element.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  const isDotted = (path) => getComputedStyle(path).strokeDasharray !== "none";
  const dotted = [...shown.querySelectorAll("path")].filter(isDotted);
  return [[...shown.querySelectorAll("text")].map(box), dotted.map(box)];
})()"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with opened(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reported")


@pytest.fixture
def page(folder: Path, tiny_data: DataSet, tiny_model: Classifier) -> Path:
    """Made for the first test that asks for it."""
    if not (folder / "report.html").exists():
        measure(tiny_model, tiny_data, SUITE, folder=folder / "run")
        for step in range(1, 9):
            record = {"loss": 2 / step, "clean_accuracy": step / 10, "robust_accuracy": step / 20}
            open_run(folder / "run").log({"kind": "step", "step": step, "epoch": step / 4, **record})
        report([folder / "run"], folder / "report.html")
    return folder / "report.html"


def holds(pixels: np.ndarray[Any, Any], box: list[float], colour: list[int]) -> bool:
    left, top, right, bottom = (round(side) for side in box)
    return bool((np.abs(pixels[top:bottom, left:right].astype(int) - colour).max(axis=2) <= 2).any())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 800, 390])
def test_the_report_shows_well(tab: Tab, page: Path, width: int, scheme: str) -> None:
    tab.open(page, width=width, height=HEIGHT, scheme=scheme)
    facts = tab.run(FACTS)
    assert facts["overflow"] == 0
    assert facts["sections"] == SECTIONS
    assert facts["images"] == 2 * 24 + 2 * 8 + 3 * 4 + 24  # attacks, occlusion, patches, perturbations
    assert facts["unseen"] == 0
    assert facts["crisp"]

    background, run = ([int(part) for part in re.findall(r"\d+", facts[name])] for name in ("background", "run"))
    assert (np.mean(background) > 200) == (scheme == "light")
    assert (np.mean(background) < 60) == (scheme == "dark")
    pixels = np.asarray(Image.open(io.BytesIO(tab.picture())).convert("RGB"))
    assert pixels[2, 2].tolist() == pixels[2, width - 3].tolist() == background

    accuracy, *panels = facts["charts"]
    assert len(panels) == 2 + 1 + 3 + 3  # security curves, distances, analysis, training
    for box in (accuracy, *panels):
        assert 0 <= box[0] < box[2] <= width
    assert holds(pixels, accuracy, run)
    assert tab.complaints() == tab.requests() == []


@pytest.mark.parametrize("width", [1280, 800, 390])
def test_the_line_of_chance_crosses_no_words_and_the_chart_is_as_wide_as_the_page(
    tab: Tab, page: Path, width: int
) -> None:
    tab.open(page, width=width, height=HEIGHT)
    words, lines = tab.run(WORDS_AND_LINES)
    assert len(lines) == 6  # one a row: clean, two radii of a curve, an attack, occlusion, the mean over corruptions
    for left, top, right, bottom in words:
        for line in lines:
            assert right <= line[0] or line[2] <= left or bottom <= line[1] or line[3] <= top
    room, chart = (
        tab.run(f"document.querySelector('{selector}').clientWidth") for selector in ("#accuracy", "#accuracy figure")
    )
    assert chart == room
    drawn = max(right for _, _, right, _ in words) - min(left for left, _, _, _ in words)
    assert drawn > 0.9 * room


def test_printed_it_opens_what_was_folded(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.emulate(media="print")
    recipe = "document.querySelector('#details details .missing').checkVisibility({contentVisibilityAuto: true})"
    assert tab.run("document.querySelector('#details details').open") is False
    assert tab.run(recipe)
    assert tab.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    tab.emulate()
    assert len(re.findall(rb"/Type\s*/Page\b", tab.pdf())) > 2

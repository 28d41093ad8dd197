"""The report as a browser shows it: wide and narrow, light and dark, of facts that the real runner measured."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bastion.measuring.runner import measure
from bastion.models import Classifier
from bastion.reporting.html import report
from bastion.run import open_run
from bastion.suite import Suite
from bastion.types import DataSet

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files"]
QUIET = ["--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
HEIGHT = 2600

# The page stands untouched in a frame, whose width and colour scheme it takes for the window's.
FRAME = """<!DOCTYPE html>
<body style="margin: 0; background: magenta">
<iframe src="{page}" style="width: {width}px; height: {height}px; border: 0; color-scheme: {scheme}"></iframe>
<script>
onload = () => {{
  const view = document.querySelector("iframe").contentWindow, page = view.document;
  const style = (element) => view.getComputedStyle(element);
  const box = (element) => {{ const b = element.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; }};
  document.title = JSON.stringify({{
    overflow: page.documentElement.scrollWidth - view.innerWidth,
    unseen: [...page.images].filter((image) => image.naturalWidth === 0).length,
    images: page.images.length,
    crisp: [...page.images].every((image) => style(image).imageRendering === "pixelated"),
    background: style(page.body).backgroundColor,
    run: style(page.querySelector(".mark")).color,
    charts: [...page.querySelectorAll("svg")].map(box).filter((b) => b[2] > b[0]),
  }});
}};
</script>
"""


@dataclass(frozen=True)
class Shown:
    facts: dict[str, Any]
    pixels: np.ndarray[Any, Any]  # (H, W, 3)
    console: list[str]


def show(page: Path, width: int, scheme: str, folder: Path) -> Shown:
    assert CHROMIUM is not None
    frame, picture = folder / "frame.html", folder / "page.png"
    frame.write_text(FRAME.format(page=page.as_uri(), width=width, height=HEIGHT, scheme=scheme))
    window = [f"--window-size={max(width, 600)},{HEIGHT}", f"--user-data-dir={folder / 'profile'}"]
    command = [CHROMIUM, *FLAGS, *QUIET, *window, "--disable-sync", "--enable-logging=stderr"]
    command += [f"--screenshot={picture}", "--dump-dom", frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    title = re.search("<title>(.*)</title>", done.stdout)
    assert title, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Shown(json.loads(title[1]), np.asarray(Image.open(picture).convert("RGB")), console)


@pytest.fixture
def page(tmp_path: Path, tiny_data: DataSet, tiny_model: Classifier) -> Path:
    attack = {"name": "pgd", "steps": 3}
    threat = {"norm": "linf", "eps": 0.05}
    suite = Suite.model_validate(
        {"probes": {"clean": "accuracy", "pgd-3": {"name": "adversarial", "threat": threat, "attack": attack}}}
    )
    measure(tiny_model, tiny_data, suite, folder=tmp_path / "run")
    for step in range(1, 9):
        record = {"loss": 2 / step, "clean_accuracy": step / 10, "robust_accuracy": step / 20}
        open_run(tmp_path / "run").log({"kind": "step", "step": step, "epoch": step / 4, **record})
    return report([tmp_path / "run"], tmp_path / "report.html")


def holds(pixels: np.ndarray[Any, Any], box: list[float], colour: list[int]) -> bool:
    left, top, right, bottom = (round(side) for side in box)
    return bool((np.abs(pixels[top:bottom, left:right].astype(int) - colour).max(axis=2) <= 2).any())


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or chrome on the PATH to show the page in")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_shows_well(page: Path, width: int, scheme: str, tmp_path: Path) -> None:
    shown = show(page, width, scheme, tmp_path)
    assert shown.console == []
    assert shown.facts["overflow"] == 0
    assert shown.facts["images"] == 24
    assert shown.facts["unseen"] == 0
    assert shown.facts["crisp"]

    background, run = ([int(part) for part in re.findall(r"\d+", shown.facts[name])] for name in ("background", "run"))
    assert (np.mean(background) > 200) == (scheme == "light")
    assert (np.mean(background) < 60) == (scheme == "dark")
    assert shown.pixels[2, 2].tolist() == shown.pixels[2, width - 3].tolist() == background

    accuracy, *panels = shown.facts["charts"]
    assert len(panels) == 3
    for box in (accuracy, *panels):
        assert 0 <= box[0] < box[2] <= width
    assert holds(shown.pixels, accuracy, run)

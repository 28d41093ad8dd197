"""Figures of a report as a PNG for the docs, by the beginnings of their titles. Needs Chromium.

python -m scripts.report_picture report.html docs/perturbations.png 'Perturbations as pictures' 'Input gradients ('
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image
from tests import browser

WIDTH = 1080  # three panels side by side
# From the title to the next one, or to the end of the article.
FIND = """(() => {
  const titles = [...document.querySelectorAll('#analysis article > h4')];
  const top = (element) => element.getBoundingClientRect().top + scrollY;
  const place = titles.findIndex((each) => each.textContent.trim().startsWith(%s));
  if (place < 0) return titles.map((each) => each.textContent.trim());
  const article = titles[place].parentElement, next = titles[place + 1];
  const end = next && next.parentElement === article ? top(next) : article.getBoundingClientRect().bottom + scrollY;
  return {top: top(titles[place]), height: end - top(titles[place]), left: article.getBoundingClientRect().left,
          width: article.clientWidth};
})()"""
MARGIN = 12
# Four panels as two and two, not as three and one.
FOUR = ".panels:has(> :nth-child(4):last-child) { grid-template-columns: repeat(2, minmax(0, 24rem)); }"
ADD_RULE = "document.styleSheets[0].insertRule(%s, document.styleSheets[0].cssRules.length)"


def save_pictures(report: Path, wanted: Mapping[Path, Sequence[str]], width: int = WIDTH) -> None:
    """Files, and the beginnings of the titles of the figures that each shows."""
    if browser.CHROMIUM is None:
        raise SystemExit("no chromium or chrome on the PATH to show the report in; install one")
    browser.PATIENCE = 300  # seconds: the machine may be busy
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, browser.opened(Path(profile)) as tab:
        tab.open(report.resolve(), width=width, height=900)
        tab.run(ADD_RULE % json.dumps(FOUR))
        for output, titles in wanted.items():
            _save([_figure(tab, report, title) for title in titles], output)


def _figure(tab: browser.Tab, report: Path, title: str) -> Image.Image:
    box = tab.run(FIND % json.dumps(title))
    if isinstance(box, list):
        raise SystemExit(f"no figure '{title}…' in {report}; it has {', '.join(box)}")
    around = {"x": box["left"] - MARGIN, "y": box["top"] - MARGIN}
    shot = tab.picture(**around, width=box["width"] + 2 * MARGIN, height=box["height"] + MARGIN)
    return Image.open(io.BytesIO(shot)).convert("RGB")


def _save(shots: Sequence[Image.Image], output: Path) -> None:
    """One below the other."""
    size = max(shot.width for shot in shots), sum(shot.height for shot in shots)
    sheet = Image.new("RGB", size, shots[0].getpixel((0, 0)))
    top = 0
    for shot in shots:
        sheet.paste(shot, (0, top))
        top += shot.height
    sheet.quantize(256, kmeans=2, dither=Image.Dither.NONE).save(output, optimize=True)
    print(f"{output}: {output.stat().st_size / 1024:.0f} KB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("titles", nargs="+")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the page, in pixels; 1000 has two panels in a row")
    options = parser.parse_args()
    save_pictures(options.report, {options.output: options.titles}, options.width)


if __name__ == "__main__":
    main()

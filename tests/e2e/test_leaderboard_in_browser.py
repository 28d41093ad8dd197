"""The leaderboard as a browser shows it: models sorted and filtered by keys and clicks, dark, narrow, printed."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.browser import Tab, needs_chromium, opened
from tests.many_models import DATA, make_many, make_run, summarize

from bastion.reporting.leaderboard import leaderboard

pytestmark = [needs_chromium]
MANY, FEW = 1000, 150
EVIL = "<img src=x onerror=alert(1)>"
# What stands in the visible rows of the first table, by the number of the column.
CELLS = (
    "[...document.querySelector('.board tbody').rows].filter((r) => !r.hidden).map((r) => r.cells[{}].dataset.value)"
)
HEAD = "document.querySelector('.board table').querySelectorAll('thead th')"


def make_page(folder: Path, count: int) -> Path:
    make_many(folder / "runs", count)
    evil = make_run(folder / "runs" / "evil")
    summarize(evil, 0.99, {"autoattack linf": 0.98}, model=EVIL)
    (evil.folder / "report.html").write_text("a report")
    leaderboard(folder / "runs", folder / "leaderboard.html")
    return folder / "leaderboard.html"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_page(tmp_path_factory.mktemp("few"), FEW)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with opened(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def values(tab: Tab, column: int) -> list[Any]:
    found = tab.run(CELLS.format(column))
    return [float(each) if each is not None else None for each in found] if column else found


def column_of(tab: Tab, title: str) -> int:
    index: int = tab.run(f"[...{HEAD}].findIndex((head) => head.textContent.startsWith('{title}'))")
    assert index >= 0
    return index


def sorted_by(tab: Tab) -> dict[int, str]:
    found = tab.run(f"[...{HEAD}].map((head) => head.getAttribute('aria-sort'))")
    return {column: order for column, order in enumerate(found) if order}


def test_many_models_open_quickly_without_a_complaint_or_a_request(tab: Tab, tmp_path: Path) -> None:
    page = make_page(tmp_path, MANY)
    began = time.perf_counter()
    tab.open(page)
    assert tab.run("document.getElementById('shown').textContent") == f"{MANY + 1} of {MANY + 1} models"
    assert time.perf_counter() - began < 10  # about one second on one free core
    assert tab.run("document.images.length") == 0  # the name that is markup stays a name
    assert values(tab, 0)[0] == EVIL
    assert tab.run("document.querySelector('.board tbody a').getAttribute('href')") == "runs/evil/report.html"
    assert tab.complaints() == []
    assert tab.requests() == []


def test_the_policy_forbids_the_network_and_other_scripts(tab: Tab, page: Path) -> None:
    tab.open(page)
    assert tab.run("fetch('https://example.org').then(() => 'went', () => 'refused')") == "refused"
    tab.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))")
    assert tab.run("window.ran === undefined")


def test_a_click_sorts_best_first_and_another_one_turns_it_round(tab: Tab, page: Path) -> None:
    tab.open(page)
    clean = column_of(tab, "clean")
    tab.click(f".board thead th:nth-child({clean + 1}) button")
    assert sorted_by(tab) == {clean: "descending"}
    assert values(tab, clean) == sorted(values(tab, clean), reverse=True)
    tab.click(f".board thead th:nth-child({clean + 1}) button")
    assert sorted_by(tab) == {clean: "ascending"}
    assert values(tab, clean) == sorted(values(tab, clean))


@pytest.mark.parametrize("turns", [1, 2])
def test_what_was_not_measured_is_last_either_way(tab: Tab, page: Path, turns: int) -> None:
    tab.open(page)
    column = column_of(tab, "autoattack l2")
    for _ in range(turns):
        tab.click(f".board thead th:nth-child({column + 1}) button")
    found = values(tab, column)
    lacking = found.count(None)
    assert 0 < lacking < len(found)
    assert None not in found[:-lacking]


@pytest.mark.parametrize("key", ["Enter", " "])
def test_keys_alone_sort(tab: Tab, page: Path, key: str) -> None:
    tab.open(page)
    tab.run("document.querySelector('.board .scroll').focus()")
    tab.press("Tab")
    assert tab.run("document.activeElement.closest('th') === document.querySelector('.board thead th')")
    tab.press(key)
    assert sorted_by(tab) == {0: "ascending"}
    names = values(tab, 0)
    assert names[1:] == sorted(names[1:])
    assert tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_words_filter_the_models(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.run("document.getElementById('filter').focus()")
    tab.type("01 vit")
    names = values(tab, 0)
    assert names and all("vit" in name and "01" in name for name in names)
    shown = int(tab.run("document.getElementById('shown').textContent").split()[0])
    assert len(names) <= shown < 50  # of both data sets
    assert tab.run("document.querySelectorAll('.board')[0].querySelectorAll('.point').length") == len(names)


def choose(tab: Tab, id: str, text: str) -> None:
    tab.run(
        f"(() => {{ const list = document.getElementById('{id}'); "
        f"list.value = [...list.options].find((each) => each.text.startsWith('{text}')).value; "
        "list.dispatchEvent(new Event('change')); })()"
    )


def test_data_and_norm_are_filters(tab: Tab, page: Path) -> None:
    tab.open(page)
    choose(tab, "data", "imagenet")
    assert tab.run("[...document.querySelectorAll('.board')].map((board) => board.hidden)") == [True, False]
    choose(tab, "data", "all")
    choose(tab, "norm", "ℓ2")
    titles = tab.run(f"[...{HEAD}].filter((head) => !head.hidden).map((head) => head.dataset.name || head.innerText)")
    assert any(title.startswith("autoattack l2") for title in titles)
    assert not any(title.startswith("autoattack linf") for title in titles)
    assert tab.complaints() == []


def test_the_plot_goes_over_parameters_too_and_has_the_colours_of_categories(tab: Tab, page: Path) -> None:
    tab.open(page)
    circles = "[...document.querySelector('.board .plot').querySelectorAll('.point')]"
    before = tab.run(f"{circles}.length")
    tab.run(
        "(() => { const list = document.querySelector('.board .across'); "
        "list.value = [...list.options].find((each) => each.text === 'Parameters').value; "
        "list.dispatchEvent(new Event('change')); })()"
    )
    assert tab.run(f"{circles}.length") == before - 1  # of one model it is not known how many it has
    assert "10 M" in tab.run("document.querySelector('.board .plot').textContent")
    colours = tab.run(f"[...new Set({circles}.map((each) => getComputedStyle(each).fill))].length")
    assert colours == 3
    tab.run("document.querySelector('.board .plot').focus()")
    tab.press("ArrowLeft")
    assert re.search(
        r": [\d.]+ [kMG], .* [\d.]+ % \([\d.]+–[\d.]+\)\.$",
        tab.run("document.querySelector('figcaption output').textContent"),
    )
    assert tab.complaints() == []


def test_sorted_by_category_models_keep_their_rank_inside(tab: Tab, page: Path) -> None:
    tab.open(page)
    worst, category = column_of(tab, "worst case"), column_of(tab, "category")
    tab.click(f".board thead th:nth-child({category + 1}) button")
    names = tab.run(CELLS.format(category))
    assert [each for each in names if each] == sorted((each for each in names if each), key=str.lower)
    for name in ("CNN", "Transformer", "hybrid"):
        inside = [value for value, each in zip(values(tab, worst), names, strict=True) if each == name and value]
        assert inside == sorted(inside, reverse=True)
    assert tab.run("document.querySelectorAll('.board tbody .begins').length") == 3  # and the one without


def test_points_are_named_by_keys_and_by_the_mouse(tab: Tab, page: Path) -> None:
    tab.open(page)
    said = "document.querySelector('.board figcaption output').textContent"
    tab.run("document.querySelector('.board .plot').focus()")
    tab.press("ArrowLeft")
    last = f"{EVIL}: 99.0 % clean, autoattack linf (ℓ∞ ≤ 8/255) 98.0 % (96.9–98.7)."
    assert tab.run(said) == last  # from the left
    tab.press("ArrowRight")
    assert tab.run(said).endswith(").") and EVIL not in tab.run(said)
    tab.run("document.activeElement.blur()")
    x, y = tab.run(
        "(() => { const plot = document.querySelector('.board .plot'); "
        "plot.scrollIntoView({block: 'center', behavior: 'instant'}); "
        "const b = [...plot.querySelectorAll('.point')].at(-1).getBoundingClientRect(); "
        "return [b.left + b.width / 2, b.top + b.height / 2]; })()"
    )
    tab.hover(x, y)
    assert tab.run(said).startswith(EVIL)


def test_the_button_saves_what_is_shown(tab: Tab, page: Path, tmp_path: Path) -> None:
    tab.open(page)
    tab.download_to(tmp_path)
    tab.run("document.getElementById('filter').focus()")
    tab.type("swin-00")
    choose(tab, "data", "cifar10")
    names = values(tab, 0)
    tab.click("#export")
    saved, end = tmp_path / "leaderboard.csv", time.monotonic() + 20
    while not saved.is_file() and time.monotonic() < end:
        tab.run("new Promise((done) => setTimeout(done, 100))")
    lines = list(csv.DictReader(io.StringIO(saved.read_text())))
    assert [line["model"] for line in lines] == names
    assert [float(line["clean"]) for line in lines] == values(tab, column_of(tab, "clean"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_shows_well(tab: Tab, page: Path, width: int, scheme: str) -> None:
    tab.open(page, width=width, scheme=scheme)
    assert tab.run("document.documentElement.scrollWidth - innerWidth") == 0
    background = [int(part) for part in re.findall(r"\d+", tab.run("getComputedStyle(document.body).backgroundColor"))]
    assert (np.mean(background) > 200) == (scheme == "light")
    pixels = np.asarray(Image.open(io.BytesIO(tab.picture())).convert("RGB"))
    assert pixels.shape[1] == width
    assert pixels[2, 2].tolist() == pixels[2, -3].tolist() == background
    plot = tab.run("(() => { const b = document.querySelector('.plot').getBoundingClientRect(); "
                   "return [b.left, b.right]; })()")  # fmt: skip
    assert 0 <= plot[0] < plot[1] <= width
    assert tab.complaints() == []


def test_long_names_of_data_fit_on_a_phone(tab: Tab, tmp_path: Path) -> None:
    name = "cifar10-mini:corruption=gaussian_noise,severity=3,jpeg85=true"
    for folder, data in {"a": DATA["cifar10"], "b": DATA["cifar10"] | {"name": name, "digest": "f09"}}.items():
        summarize(make_run(tmp_path / "runs" / folder), 0.8, {"autoattack linf": 0.4}, data=data)
    leaderboard(tmp_path / "runs", tmp_path / "page.html")
    tab.open(tmp_path / "page.html", width=390)
    assert tab.run("document.documentElement.scrollWidth - innerWidth") == 0


def test_printed_it_has_every_model_and_no_controls(tab: Tab, page: Path) -> None:
    tab.open(page)
    assert tab.run("getComputedStyle(document.querySelector('.tools')).display") == "flex"
    tab.emulate(media="print")
    assert tab.run("getComputedStyle(document.querySelector('.tools')).display") == "none"
    hidden = "(() => { const s = document.querySelector('.scroll'); return s.scrollHeight - s.clientHeight; })()"
    assert tab.run(hidden) <= 1
    tab.emulate()
    tab.run("document.getElementById('filter').focus()")
    tab.type("swin")
    shown = int(tab.run("document.getElementById('shown').textContent").split()[0])
    pages = len(re.findall(rb"/Type\s*/Page\b", tab.pdf()))
    assert shown / 40 < pages < shown / 5

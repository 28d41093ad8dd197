from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import made_runs
import numpy as np
import pytest
from made_runs import MakeRun, measure_cases, measure_everything, measure_run, train_run

from bastion.errors import BastionError
from bastion.measuring.facts import read_measurements, write_measurement
from bastion.measuring.measurement import MeasuredAggregate, MeasuredCase, Published
from bastion.measuring.sanity import CHECKS
from bastion.measuring.store import FactStore
from bastion.reporting import html
from bastion.reporting.html import report
from bastion.run import Run, create_run

EVIL = "<script>alert('x')</script>"
VOID = {"meta", "img", "br", "path", "use"}


class Page(HTMLParser):
    """Elements and their ids; cells of tables; the text of everything."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(content)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if {"td", "th"} & set(self._open):
            self.rows[-1][-1] += f" {data.strip()}"


@pytest.fixture
def runs(make_run: MakeRun) -> list[Run]:
    return [make_run("robust", clean=0.47, robust=0.265), make_run("standard", clean=0.55, robust=0)]


def page_of(runs: list[Run], output: Path) -> str:
    return report([run.folder for run in runs], output).read_text()


def test_the_table_holds_the_numbers_of_the_facts(runs: list[Run], tmp_path: Path) -> None:
    page = Page(page_of(runs, tmp_path / "report.html"))
    rows = {row[0].split()[-1]: [cell.split() for cell in row[1:]] for row in page.rows[1:3]}
    for run in runs:
        (facts,) = read_measurements(run)
        assert rows[run.name] == [
            [f"{100 * e.value:.1f}", "%", f"{100 * e.low:.1f}–{100 * e.high:.1f}"] for e in facts.accuracies().values()
        ]
    assert rows["robust"][1] == ["26.5", "%", "20.9–33.0"]
    assert [cell.split()[0] for cell in page.rows[0]] == ["run", "clean", "pgd-20", "worst"]


def test_the_papers_numbers_stand_below_the_runs_own_with_their_source(make_run: MakeRun, tmp_path: Path) -> None:
    note = "pgd-20: with <weak> steps"
    published = Published(numbers={"clean": 0.629, "pgd-20": 0.389, "mFR": 0.4}, source="Table 1 of A. 2022", note=note)
    runs = [make_run("robust", clean=0.47, robust=0.265, about={"published": published})]
    runs.append(make_run("standard", clean=0.55, robust=0))
    page = Page(page_of(runs, tmp_path / "report.html"))
    rows = [[cell.split()[:2] for cell in row] for row in page.rows[1:4]]
    assert [row[0][-1] for row in rows] == ["robust", "robust", "standard"]
    assert rows[1] == [["paper", "robust"], ["62.9", "%"], ["38.9", "%"], ["–"]]
    assert "Paper of robust: Table 1 of A. 2022; pgd-20: with <weak> steps." in page.text
    alone = Page(page_of(runs[1:], tmp_path / "alone.html"))
    assert not [row for row in alone.rows if "paper" in row[0]] and "Paper" not in alone.text


def test_the_papers_mean_flip_rate_stands_with_ours(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    case = {"role": "corruption", "columns": {"flip_rate": np.full(8, 0.25, dtype=np.float32)}}
    mean = MeasuredAggregate(kind="mean", members={"tilt": 1.0}, column="flip_rate")
    published = Published(numbers={"mean flip rate": 0.4}, source="Table 1 of A. 2022")
    measure_cases(run, {"tilt": case}, aggregates={"mean flip rate": mean}, published=published)
    page = Page(page_of([run], tmp_path / "report.html"))
    (row,) = [row for row in page.rows if row[0].strip() == "mean flip rate"]
    assert row[1].startswith(" 25.0 %") and row[1].endswith("paper 40.0 %")
    assert "Paper: Table 1 of A. 2022." in page.text


def test_ids_are_unique_and_links_lead_to_them(runs: list[Run], tmp_path: Path) -> None:
    page = Page(page_of(runs, tmp_path / "report.html"))
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)


def test_the_page_needs_nothing_but_itself(runs: list[Run], tmp_path: Path) -> None:
    content = page_of(runs, tmp_path / "report.html")
    page = Page(content)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", re.sub(r"base64,[\w+/=]+", "", content))
    assert not {"script", "link", "iframe", "object", "base"} & set(page.tags)
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert "default-src 'none'" in content  # and a browser would refuse


def test_the_same_facts_give_the_same_bytes(runs: list[Run], tmp_path: Path) -> None:
    assert page_of(runs, tmp_path / "one.html") == page_of(runs, tmp_path / "two.html")


def test_text_of_the_data_is_never_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train_run(tmp_path / EVIL.replace("/", "∕"), robust=0.2, about=EVIL)
    run.log({"kind": "event", "step": 1, "message": EVIL})
    texts = {"command": EVIL, "suite": EVIL.replace("/", "∕"), "machine": {EVIL: EVIL}, "versions": {EVIL: EVIL}}
    texts |= {"data": {"name": EVIL, "fingerprint": "1", "split": EVIL}, "created": EVIL}
    monkeypatch.setitem(made_runs.SPECS, "attack", {"name": EVIL, EVIL: EVIL})
    measure_run(run, clean=0.5, robust=0.2, classes=(EVIL,) * 10, label=EVIL, about=texts)
    content = page_of([run], tmp_path / "report.html")
    assert "<script" not in content
    assert content.count("&lt;script&gt;") > 40
    assert "script" not in Page(content).tags


def test_the_resolved_recipe_and_the_events_are_shown(runs: list[Run], tmp_path: Path) -> None:
    text = Page(page_of(runs, tmp_path / "report.html")).text
    assert (runs[0].folder / "recipe.yaml").read_text().rpartition("# run ")[0] in text  # all but its checksum
    assert "resumed from checkpoint 240" in text
    assert "{name: adversarial, attack: {name: pgd, rel_step: 0.1}}" in text


def sections(content: str) -> list[str]:
    return re.findall('<section id="([^"]+)"', content)


def test_a_run_that_was_only_trained_has_curves_alone(tmp_path: Path) -> None:
    content = page_of([train_run(tmp_path / "run", robust=0.2)], tmp_path / "report.html")
    text = Page(content).text
    assert "No accuracy has been measured yet." in text
    assert "Not measured yet: run." in text
    assert "training loss" in text
    assert sections(content) == ["accuracy", "training", "details"]


def test_a_run_that_was_only_measured_has_no_empty_sections(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    measure_run(run, clean=0.5, robust=0.2, images=np.zeros((0, 3, 32, 32), np.float32))
    content = page_of([run], tmp_path / "report.html")
    assert sections(content) == ["accuracy", "classes", "details"]
    assert re.findall('<a href="#([^"]+)"', content) == sections(content)
    assert "No recipe: the model was not trained in this run." in Page(content).text
    assert "Not measured yet" not in content


def test_facts_of_every_kind_have_their_section(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    measure_everything(run)
    content = page_of([run], tmp_path / "report.html")
    assert sections(content) == [
        "accuracy", "attacks", "security", "distances", "corruptions", "resolution", "classes", "cost", "details"
    ]  # fmt: skip
    text = " ".join(Page(content).text.split())
    assert "1. apgd-ce" in text and "pgd: accuracy (%)" in text and "radius ε (ℓ∞)" in text
    assert "parameters696 k" in text
    assert "multiply-accumulates per image26.4 M" in text


def test_the_page_tells_how_to_repeat_it(runs: list[Run], tmp_path: Path) -> None:
    page = Page(page_of(runs, tmp_path / "report.html"))
    for fact in ("command", "seed3", "weights5eed", "dataf00d", "versionspython"):
        assert fact in "".join(page.text.split(" "))


def test_a_suite_without_accuracies_shows_its_values(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    measure_run(run, clean=0.5, robust=0.2)
    (facts,) = read_measurements(run)
    store = FactStore(run.facts / "identity" / "sigma")
    store.write(range(200), {"largest": np.full(200, 2.5, np.float32)}, {}, {})
    sigma = MeasuredCase(
        label="sigma", kind="probes", role="analysis", store=store.name, n=200, spec={}, columns=("largest",)
    )
    only = {"suite": "analysis", "cases": (sigma,), "aggregates": {}}
    write_measurement(run, facts.about.model_copy(update=only))
    page = Page(page_of([run], tmp_path / "report.html"))
    assert "suite analysis" in page.text
    assert [" sigma/largest", " 2.5 2.5 to 2.5, n = 200"] in page.rows


def test_warnings_stand_with_the_accuracies_of_their_model(make_run: MakeRun, tmp_path: Path) -> None:
    symptoms = {"nan": 0, "zero-gradient": 0.115, "square-beats-white-box": 0, EVIL: 0.005}
    doubtful = make_run("doubtful", clean=0.5, robust=0.4, symptoms=symptoms)
    sound = make_run("sound", clean=0.5, robust=0.2, symptoms=dict.fromkeys(symptoms, 0))
    content = page_of([doubtful, sound], tmp_path / "report.html")
    page, text = Page(content), " ".join(Page(content).text.split())
    assert "doubtful: 2 warnings about these numbers" in text
    assert f"zero-gradient23 of 200 examples, probe sanity {CHECKS['zero-gradient'].meaning}" in text
    assert f"{EVIL}1 of 200 examples, probe sanity A plug-in’s check" in text
    assert "script" not in page.tags
    assert "Sanity checks: 4 were made of sound, and found nothing." in text
    assert "Sanity checks warn about the numbers of doubtful: see below." in text
    assert ["⚠" in row[0] for row in page.rows[1:3]] == [True, False]
    assert not any("warning" in cell for row in page.rows for cell in row)
    assert text.index("2 warnings") < text.index("Dots are accuracies")


def test_a_page_says_that_checks_found_nothing_only_if_they_were_made(
    runs: list[Run], make_run: MakeRun, tmp_path: Path
) -> None:
    unchecked = Page(page_of(runs, tmp_path / "report.html")).text
    assert "Sanity" not in unchecked and "⚠" not in unchecked
    sound = make_run("sound", clean=0.5, robust=0.2, symptoms={"nan": 0, "stochastic": 0})
    text = Page(page_of([sound], tmp_path / "report.html")).text
    assert "Sanity checks: 2 were made, and found nothing." in text
    assert "⚠" not in text and "about these numbers" not in text


def test_a_page_says_which_intervals_are_about_all_images_if_measuring_stopped_early(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    cases = {
        f"corrupted type={name} severity={level}": {
            "role": "corruption",
            "at": {"type": name, "severity": level},
            "n": 40,
            "columns": {"correct": np.arange(100) < 80 - level},
        }
        for name in ("fog", "snow")
        for level in (1, 2)
    }
    cases["clean"] = {"role": "clean", "n": 40, "columns": {"correct": np.arange(100) < 80}}
    for suite in ("one", "two"):
        measure_cases(run, cases, suite=suite, population=100)
    content = page_of([run], tmp_path / "page.html")
    told = (
        "Measuring stopped after 40 of 100 examples in random order; intervals of accuracies, error rates and other "
        "shares are about all of them, and valid at any stopping time; those of two-phase estimates and other numbers "
        "are ordinary intervals."
    )
    assert content.count(told) == 2
    assert content.count("n = 40 of 100, stopped early") == 2  # in the overview: clean and corruptions


def test_a_suite_of_sanity_checks_alone_shows_its_warnings(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", seed=0)
    measure_run(run, clean=0.5, robust=0.2, symptoms={"stochastic": 1})
    (facts,) = read_measurements(run)
    only = {"suite": "checks", "cases": (facts.case("sanity"),), "aggregates": {}}
    write_measurement(run, facts.about.model_copy(update=only))
    assert Page(page_of([run], tmp_path / "report.html")).text.count("run: 1 warning about these numbers") == 2


def test_what_is_no_run_or_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BastionError, match=r"not a run, not a folder with card\.json"):
        report([tmp_path], tmp_path / "report.html")
    run = create_run(tmp_path / "run", seed=0)
    with pytest.raises(BastionError, match="cannot be written"):
        report([run.folder], tmp_path)


def test_a_report_needs_no_torch(runs: list[Run], tmp_path: Path) -> None:
    code = (
        "import sys; from bastion.reporting.html import report; report(sys.argv[1:-1], sys.argv[-1]); "
        "sys.exit('torch' in sys.modules)"
    )
    folders = [str(run.folder) for run in runs]
    subprocess.run([sys.executable, "-W", "error", "-c", code, *folders, str(tmp_path / "r.html")], check=True)


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_all_text_has_enough_contrast(scheme: int) -> None:
    sheet = (Path(html.__file__).parent / "templates" / "page.css").read_text()
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", re.findall(r":root \{(.*?)\}", sheet, re.DOTALL)[scheme]))
    assert len(colours) == 17
    for paper in ("paper", "tint"):
        for name in colours.keys() - {"paper", "tint", "line"}:
            lights = sorted([luminance(colours[name]), luminance(colours[paper])])
            assert (lights[1] + 0.05) / (lights[0] + 0.05) >= 4.5, name
    # The cell of a heat map with 100 % has 55 % of a colour in it.
    parts = [[int(colours[name][i : i + 2], 16) for i in (1, 3, 5)] for name in ("run-0", "paper")]
    cell = "#" + "".join(f"{round(0.55 * one + 0.45 * other):02x}" for one, other in zip(*parts, strict=True))
    lights = sorted([luminance(colours["ink"]), luminance(cell)])
    assert (lights[1] + 0.05) / (lights[0] + 0.05) >= 4.5

"""What many models show together: categories, rank correlations, gaps, paths over a setting, pairs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
from tests.many_models import DATA, make_run, summarize

from bastion.errors import BastionError
from bastion.measuring.intervals import wilson
from bastion.measuring.measurement import MeasuredCase
from bastion.recipe import Recipe
from bastion.reporting.boards import Board, cell, read_boards
from bastion.reporting.categories import category_means, correlations
from bastion.reporting.gaps import gap_figures
from bastion.reporting.leaderboard import leaderboard
from bastion.reporting.recipe_paths import _split_setting, path_figure
from bastion.run import create_run

# Clean, PGD linf and PGD l2 accuracies of Table 1 of Tang et al. 2022, in %.
PUBLISHED = {
    "Transformer": {"ViT": (78.76, 46.02, 30.86), "Mixer": (62.86, 38.93, 29.27), "Swin": (80.44, 48.61, 26.58)},
    "hybrid": {"PVTv2": (75.99, 46.48, 35.77), "BoTNet": (80.76, 51.29, 25.84), "CvT": (73.76, 41.36, 12.75)},
    "CNN": {"VGG": (84.30, 50.87, 26.78), "WRN": (89.54, 55.17, 22.55), "ResNet": (87.92, 54.18, 17.52)},
}


@pytest.fixture
def board(tmp_path: Path) -> Board:
    for category, models in PUBLISHED.items():
        for name, (clean, linf, l2) in models.items():
            robust = {"autoattack linf": linf / 100, "autoattack l2": l2 / 100}
            summarize(make_run(tmp_path / name), clean / 100, robust, n=10_000, category=category, parameters=10**7)
    ((board,), _) = read_boards(tmp_path)
    return board


def table(figure: Any) -> dict[str, list[str]]:
    return {name: list(cells) for name, cells in figure.table.rows}


def test_categories_have_the_means_of_their_models(board: Board) -> None:
    assert board.categories == ["CNN", "Transformer", "hybrid"]
    rows = table(category_means(board))
    # Ranked by the worst case: VGG first.
    assert rows["CNN"] == ["3", "VGG", "87.3", "22.3", "53.4", "22.3", "10\u00a0M"]
    assert [entry.model for entry in board.entries][:2] == ["PVTv2", "ViT"]
    assert category_means(replace(board, entries=board.entries[:2])) is not None  # two categories
    assert category_means(replace(board, entries=board.entries[:1])) is None


def test_means_of_categories_leave_two_phase_estimates_out(board: Board) -> None:
    """They are not told without their intervals."""
    attacked = next(column for column in board.columns if column.title == "autoattack linf")
    columns = [replace(column, is_two_phase=column is attacked) for column in board.columns]
    figure = category_means(replace(board, columns=columns))
    assert figure is not None and figure.table is not None
    assert list(figure.table.columns[3:]) == ["clean", "autoattack l2 (ℓ2 ≤ 0.5)", "worst case", "parameters"]


def test_correlations_are_those_between_columns(board: Board) -> None:
    figure = correlations(board)
    assert figure is not None and figure.table is not None
    rows, names = table(figure), list(figure.table.columns[1:])
    linf, l2 = (next(name for name in rows if name.startswith(f"autoattack {norm}")) for norm in ("linf", "l2"))
    numbers = [values for models in PUBLISHED.values() for values in models.values()]
    expected = scipy.stats.spearmanr([each[1] for each in numbers], [each[2] for each in numbers]).statistic
    found = rows[linf][names.index(l2)]  # below the diagonal only
    assert found.startswith(f"{expected:+.2f}".replace("-", "−"))
    assert re.fullmatch(r"[+−]\d\.\d\d \([+−]\d\.\d\d to [+−]\d\.\d\d\)", found)
    assert rows[l2][names.index(linf)] == ""
    assert rows["parameters"] == ["–"] * len(rows["parameters"])  # all models have as many


def test_a_studys_number_is_a_column_of_its_own(tmp_path: Path) -> None:
    case = MeasuredCase(
        label="weights", kind="studies", role="analysis", store="identity/1", n=1, spec={"name": "sparsity"},
        columns=("sparsity", "share", "parameters"), meanings={"sparsity": "share of small weights"},
    )  # fmt: skip
    for number in range(5):
        run = make_run(tmp_path / f"m{number}")
        summarize(run, 0.8, {"autoattack linf": 0.1 * number})
        scalars = {"weights/sparsity": 0.5 - 0.1 * number, "weights/parameters": 7.0}
        summarize(run, 0.8, {}, n=1, cases=(case,), summary={}, aggregates={}, scalars=scalars)
    ((board,), _) = read_boards(tmp_path)
    (column,) = board.columns_of("study")
    assert (column.title, column.spec) == ("weights: sparsity", "share of small weights")
    assert cell(board.entries[0], column) == {"value": "0.1", "low": "", "high": "", "n": "", "population": ""}
    assert "−1.00 (−1.00 to " in str(table(correlations(board)))
    leaderboard(tmp_path, tmp_path / "page.html")
    assert re.search(r'<td data-value="0.0999\d*">0.1</td>', (tmp_path / "page.html").read_text())


def test_the_gap_is_between_both_splits_of_a_model(tmp_path: Path) -> None:
    train = DATA["cifar10"] | {"split": "train", "digest": "77"}
    for name, (seen, unseen) in {"overfitted": (0.9, 0.5), "plain": (0.6, 0.55)}.items():
        run = make_run(tmp_path / name)
        summarize(run, 0.95, {"autoattack linf": unseen}, category="CNN")
        summarize(run, 0.99, {"autoattack linf": seen}, data=train, n=500)
    summarize(make_run(tmp_path / "once"), 0.9, {"autoattack linf": 0.3})
    boards, _ = read_boards(tmp_path)
    (figure,) = gap_figures(boards).values()
    rows = table(figure)
    assert list(rows) == ["plain", "overfitted"]  # as ranked on test images; `once` has no training images
    place = figure.table.columns.index("autoattack linf (ℓ∞ ≤ 8/255), train") - 1  # type: ignore[union-attr]
    assert rows["overfitted"][0] == "CNN"
    assert rows["overfitted"][place].startswith("90.0 (")
    assert rows["overfitted"][place + 1].startswith("50.0 (")
    low, high = wilson(450, 500), wilson(500, 1000)
    margin = 100 * ((low.value - low.low) ** 2 + (high.high - high.value) ** 2) ** 0.5
    assert rows["overfitted"][place + 2].startswith(f"+40.0 ({40 - margin:+.1f} to ")
    other = {**DATA["cifar10"], "fingerprint": "other", "split": "train"}
    summarize(make_run(tmp_path / "once"), 0.9, {"autoattack linf": 0.3}, data=other)
    assert len(gap_figures(read_boards(tmp_path)[0])) == 1  # other data are no training images of these


def trained(folder: Path, l1: float, robust: float, *, seed: int = 0, model: str = "vit/micro") -> None:
    content = {
        "data": "cifar10-mini", "model": model, "objective": "standard", "seed": seed, "optimizer": {"l1": l1},
        "about": f"with {l1}",
    }  # fmt: skip
    recipe = Recipe.model_validate(content)
    summarize(create_run(folder, seed=seed, recipe=recipe), 0.8 - 100 * l1, {"autoattack linf": robust})


def test_runs_that_differ_in_one_setting_are_a_path(tmp_path: Path) -> None:
    for number, (l1, robust) in enumerate([(0.0, 0.3), (1e-5, 0.35), (1e-4, 0.33)]):
        trained(tmp_path / f"vit-{number}", l1, robust)
        trained(tmp_path / f"vit-{number}-again", l1, robust + 0.01, seed=1)
    trained(tmp_path / "resnet", 1e-5, 0.2, model="resnet/micro")  # alone
    boards, _ = read_boards(tmp_path)
    figure = path_figure(boards[0], "optimizer.l1")
    assert figure is not None and len(figure.panels) == 2
    robust = str(figure.panels[1])
    assert "worst case" in robust and all(f">{tick}<" in robust for tick in ("0", "1e-05", "0.0001"))
    leaderboard(tmp_path, tmp_path / "page.html", over="optimizer.l1")
    page = (tmp_path / "page.html").read_text()
    assert "<h3>Over optimizer.l1</h3>" in page
    assert not re.search(r"\sstyle=", page)  # as the page's policy wants it


def test_the_rest_of_the_recipe_names_a_path() -> None:
    base = {"optimizer": {"l1": 0.5, "lr": 1.0}, "seed": 1}
    value, rest = _split_setting(base, "optimizer.l1", None)  # type: ignore[arg-type]
    assert value == 0.5
    assert rest == _split_setting({"optimizer": {"l1": 2, "lr": 1.0}, "seed": 3}, "optimizer.l1", None)[1]  # type: ignore[arg-type]
    assert rest != _split_setting({"optimizer": {"l1": 2, "lr": 2.0}}, "optimizer.l1", None)[1]  # type: ignore[arg-type]
    assert base == {"optimizer": {"l1": 0.5, "lr": 1.0}, "seed": 1}


def test_a_setting_that_is_no_number_or_that_nobody_varies_is_one_line(tmp_path: Path) -> None:
    trained(tmp_path / "a", 0.0, 0.3)
    with pytest.raises(BastionError, match=r"over: optimizer\.name of the recipe in .* is 'adamw'; expected a setting"):
        leaderboard(tmp_path, tmp_path / "page.html", over="optimizer.name")
    with pytest.raises(BastionError, match=r"over: no two trained and measured runs differ in optimizer\.l1 alone"):
        leaderboard(tmp_path, tmp_path / "page.html", over="optimizer.l1")
    with pytest.raises(BastionError, match="pair: no two measured models have names that differ by the word"):
        leaderboard(tmp_path, tmp_path / "page.html", pair="convstem")


def test_names_that_differ_by_a_word_are_a_pair(tmp_path: Path) -> None:
    for name, robust in {"vit-s-heavy": 0.39, "vit-s-convstem-heavy": 0.44, "iso-convstem": 0.42}.items():
        summarize(make_run(tmp_path / name), 0.7, {"autoattack linf": robust, "autoattack l2": robust - 0.05})
    leaderboard(tmp_path, tmp_path / "page.html", pair="convstem")
    page = (tmp_path / "page.html").read_text()
    section = page[page.index("<h3>With and without convstem") :]
    assert section.count("<svg") == 4  # clean, two threats, worst case
    assert "vit-s-heavy" in section and "iso" not in section

"""Figures of the probes of RSPC, of two models that the real runner measured."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tests.vits import small_vit

from bastion.measuring.runner import measure
from bastion.measuring.store import Column
from bastion.reporting.figures import Figure, draw
from bastion.reporting.figures.attention_stability import SQUARE, _heat, _marked
from bastion.reporting.html import report
from bastion.reporting.tables import SharedTable, read_runs, shared_tables
from bastion.types import DataSet

SUITE = {
    "probes": {
        "occlusion": {"name": "occlusion", "size": 4, "share": 0.5, "masks": 60},
        "one mask": {"name": "occlusion", "size": 4},
        "confidence": {"name": "patch-confidence", "size": 4},
        "attention": {"name": "attention-stability", "size": 4, "masks": 50},
    }
}
N = 6


def measured(data: DataSet, folder: Path, limit: int = N, keep: int = 3) -> SharedTable:
    for depth in (1, 2):
        model = small_vit(depth=depth, size=8).float()
        measure(model, data, SUITE, folder=folder / f"depth-{depth}", limit=limit, keep=keep)
    (table,) = shared_tables(read_runs([folder / "depth-1", folder / "depth-2"]))
    return table


@pytest.fixture
def table(tiny_data: DataSet, tmp_path: Path) -> SharedTable:
    return measured(tiny_data, tmp_path)


def by_title(table: SharedTable) -> dict[str, Figure]:
    figures = {figure.title: figure for figure in draw(table)}
    assert len(figures) == len(draw(table))
    return figures


def column(table: SharedTable, row: int, name: str) -> Column:
    return table.rows[row].facts.columns[name]


def test_every_figure_of_the_paper_is_there_in_the_colours_of_the_page(table: SharedTable) -> None:
    figures = by_title(table)
    assert list(figures) == [
        "Accuracy over occlusion masks",
        "occlusion: one image under 60 masks",
        "occlusion: occluded images",
        "one mask: occluded images",
        "confidence: confidence in the true class",
        "confidence: the images",
        "attention: attention on clean and on occluded images",
        "attention: attention by layer and head",
        "attention: one image under 50 masks",
        "attention: attention of the centre",
    ]
    assert not any(re.search("#000[01]", panel) for figure in figures.values() for panel in figure.panels)


def test_accuracies_over_masks_are_told_with_what_depends_on_the_mask(table: SharedTable) -> None:
    figure = by_title(table)["Accuracy over occlusion masks"]
    assert len(figure.panels) == 1 and figure.table  # one mask has no box
    for row in range(2):
        right = column(table, row, "occlusion/right_by_mask")
        always, ever, by_mask = right.all(1).mean(), right.any(1).mean(), right.mean(0)
        name, cells = figure.table.rows[row]
        assert name == f"depth-{row + 1}"
        assert cells[1].startswith(f"{100 * right.mean():.1f} % (")
        assert cells[2:] == [
            f"{100 * np.std(by_mask, ddof=1):.2f} points",
            f"{100 * by_mask.min():.1f} to {100 * by_mask.max():.1f} %",
            f"{100 * always:.1f} %",
            f"{100 * (ever - always):.1f} %",
        ]


def test_confidences_and_similarities_are_means_over_the_images(table: SharedTable) -> None:
    figures = by_title(table)
    confidence = figures["confidence: confidence in the true class"].table
    similarity = figures["attention: attention on clean and on occluded images"].table
    assert confidence and confidence.columns == ["run", "clean", "PGD-5", "Gaussian σ 0.38", "occluded"]
    assert similarity
    for row in range(2):
        for cell, change in zip(confidence.rows[row][1], ("clean", "adversarial", "noisy", "occluded"), strict=True):
            assert cell.startswith(f"{100 * column(table, row, f'confidence/{change}_confidence').mean():.1f} % (")
        values = column(table, row, "attention/similarity")
        cells = similarity.rows[row][1]
        assert cells[0].startswith(f"{values.mean():.3f} (") and cells[2] == f"{values.min():.3f}"
        assert cells[3] == f"{row + 1} × 2"


def test_heads_are_cells_of_one_scale_for_all_models(table: SharedTable) -> None:
    figure = by_title(table)["attention: attention by layer and head"]
    means = [column(table, row, "attention/similarity_by_head").mean(0) for row in range(2)]
    for panel, mean in zip(figure.panels, means, strict=True):
        assert len(re.findall(r"<path[^>]*fill: #[0-9a-f]{6}", panel)) == mean.size
    low, high = min(each.min() for each in means), max(each.max() for each in means)
    assert f"from {low:.3f} (dark) to {high:.3f} (bright)" in figure.caption


def test_pictures_are_of_the_same_images_in_every_model_and_say_what_is_shown(table: SharedTable) -> None:
    figures = by_title(table)
    centre = figures["attention: attention of the centre"]
    assert [panel.count("<img") for panel in centre.panels] == [2 * 2, 2 * 3, 2 * 2, 2 * 3]  # image and layers, twice
    assert [re.search(r"image (\d)", panel)[1] for panel in centre.panels] == ["0", "0", "1", "1"]
    strip = figures["occlusion: occluded images"].panels[0]
    assert strip.count("<img") == 2 * 3 and "Patches are random" in figures["occlusion: occluded images"].caption
    for row in range(2):
        shown = column(table, row, "occlusion/confidence_by_mask")[0, 0]
        assert f"{100 * float(shown):.1f}&nbsp;%" in strip
    assert all(panel.count("<img") == 3 * 4 for panel in figures["confidence: the images"].panels)


def test_no_pictures_and_a_single_image_are_no_trouble(tiny_data: DataSet, tmp_path: Path) -> None:
    table = measured(tiny_data, tmp_path, limit=1, keep=0)
    figures = by_title(table)
    assert list(figures) == [
        "Accuracy over occlusion masks",
        "occlusion: one image under 60 masks",
        "confidence: confidence in the true class",
        "attention: attention on clean and on occluded images",
        "attention: attention by layer and head",
        "attention: one image under 50 masks",
    ]
    assert [len(figure.panels) for figure in figures.values()] == [0, 1, 1, 2, 2, 1]  # one image has no box
    assert "inf" not in report([tmp_path / "depth-1"], tmp_path / "page.html").read_text()


def test_drawings_on_a_page_share_no_id(table: SharedTable, tmp_path: Path) -> None:
    page = report([row.run.files.folder for row in table.rows], tmp_path / "page.html").read_text()
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_attention_is_drawn_from_dark_to_bright_and_the_centre_is_framed() -> None:
    heat = _heat(np.array([[0.0, 0.5], [0.25, 1.0]]), 1.0).astype(int).sum(0)
    assert heat[0, 0] < heat[1, 0] < heat[0, 1] < heat[1, 1]
    framed = _marked(np.zeros((3, 32, 32), np.float32), (4, 4))
    red = (framed == np.array(SQUARE)[:, None, None]).all(0)
    rows, columns = np.nonzero(red)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (
        64,
        95,
        64,
        95,
    )  # the third cell of four, enlarged
    assert not red[70:90, 70:90].any()

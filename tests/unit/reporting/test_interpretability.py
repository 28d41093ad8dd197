"""Figures about perturbations, gradients and units, of models that were really measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_runs import measure_cases

from bastion.data.arrays import ArraySplit
from bastion.measuring.facts import Facts
from bastion.measuring.intervals import Estimate
from bastion.measuring.runner import measure
from bastion.models import checkpoint
from bastion.probes.spectrum import energy_shares
from bastion.reporting import figures
from bastion.reporting.figures import Figure
from bastion.reporting.html import report
from bastion.reporting.pictures import Picture, figure, grey, grid
from bastion.reporting.spectra import by_ring, white_noise
from bastion.reporting.tables import read_runs, shared_tables
from bastion.reporting.wording import quantity_cell, share_cell
from bastion.run import create_run
from bastion.types import DataSet

VIT = {"name": "vit/micro", "num_classes": 3, "img_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
ATTACK = {"name": "pgd", "steps": 2}


def suite(other: Path) -> dict[str, Any]:
    return {
        "probes": {
            "pert": {"name": "perturbation", "attack": ATTACK, "classifiers": [str(other)]},
            "pert-l2": {"name": "perturbation", "threat": {"norm": "l2", "eps": 0.5}, "attack": ATTACK},
            "made": {"name": "synthesis", "start": "image", "steps": 2, "classifiers": [str(other)]},
            "noise": {"name": "synthesis", "steps": 2},
            "saliency": "input-gradient",
            "filters": {"name": "frequency", "cutoffs": [0, 0.25, 0.71], "attack": ATTACK},
        },
        "studies": {
            "classes": {"name": "feature-visualisation", "layer": "logits", "steps": 2, "start": "image"},
            "units": {"name": "feature-visualisation", "units": [3, 1], "steps": 2},
        },
    }


def save_vit(folder: Path, seed: int) -> Path:
    model = checkpoint.build(VIT, mean=(0.4,) * 3, std=(0.2,) * 3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(seed))
    checkpoint.save(model, folder)
    return folder


@pytest.fixture(scope="module")
def data() -> DataSet:
    """Ten images of each split in three classes, one after the other."""
    images = np.random.default_rng(0).integers(0, 256, (30, 8, 8, 3), dtype=np.uint8)
    split = ArraySplit(images, np.arange(30, dtype=np.uint8) % 3)
    train, val, test = (split.subset(range(start, start + 10)) for start in (10, 20, 0))
    half = (0.5,) * 3
    return DataSet("noise", ("red", "green", "blue"), (3, 8, 8), half, half, train, val, test, "noise-1")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vit(tmp_path_factory.mktemp("other"), seed=2)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, data: DataSet, other: Path) -> list[Facts]:
    """The same measurement of two models, in runs `one` and `two`."""
    folder = tmp_path_factory.mktemp("runs")
    models = {name: save_vit(folder / "models" / name, seed) for seed, name in enumerate(("one", "two"))}
    return [
        measure(model, data, suite(other), folder=folder / name, batch_size=10, keep=8)
        for name, model in models.items()
    ]


@pytest.fixture(scope="module")
def shown(two: list[Facts]) -> dict[str, Figure]:
    return drawn(two)


def drawn(runs: list[Facts]) -> dict[str, Figure]:
    """By title."""
    (table,) = shared_tables(read_runs([facts.run.folder for facts in runs]))
    made = figures.draw(table)
    assert len({figure.title for figure in made}) == len(made)
    return {figure.title: figure for figure in made}


def sources(panel: str) -> list[str]:
    return re.findall(r'<img src="([^"]+)"', panel)


def test_all_models_are_shown_on_the_same_images(shown: dict[str, Figure]) -> None:
    panels = shown["Perturbations as pictures (pert, ℓ∞ ≤ 4/255)"].panels
    assert ["one" in panels[0], "two" in panels[1]] == [True, True]
    clean = [sources(panel)[::4] for panel in panels]  # clean, adversarial, perturbation, in grey
    assert len(sources(panels[0])) == 4 * 6
    assert clean[0] == clean[1] and len(set(clean[0])) == 6
    perturbations = [sources(panel)[2::4] for panel in panels]
    assert perturbations[0] != perturbations[1]


def test_tables_of_classifiers_have_both_signs_and_intervals(
    two: list[Facts], shown: dict[str, Figure], other: Path
) -> None:
    table = shown["Perturbations classified, top-1 (pert)"].table
    assert table is not None
    assert table.columns == ["perturbation of", "the model itself", str(other)]
    assert [name for name, _ in table.rows] == ["one, δ", "one, −δ", "two, δ", "two, −δ"]
    seen = two[1].columns["pert/top1_negative"]
    assert table.rows[3][1] == [share_cell(two[1].estimate(column)) for column in seen.T]


def test_a_norm_without_a_bound_per_pixel_says_how_it_was_drawn(shown: dict[str, Figure]) -> None:
    caption = shown["Perturbations as pictures (pert-l2, ℓ2 ≤ 0.5)"].caption
    assert "the largest change of a pixel in these examples" in caption


def test_synthesised_images_stand_beside_their_starts_and_targets(
    two: list[Facts], shown: dict[str, Figure], other: Path
) -> None:
    first, second = shown["Images made for a class (made)"].panels
    assert len(sources(first)) == len(sources(second)) == 3 * 6  # start, made, change
    assert re.findall(r"<figcaption>(\w+)<", first) == ["red", "green", "blue"] * 2
    targets = [("red", "green", "blue")[each] for each in two[0].columns["made/target"][:6]]
    assert re.findall(r"</span> (\w+)</figcaption>", first) == targets
    noise = shown["Images made for a class (noise)"].panels
    assert sources(noise[0])[::3] == sources(noise[1])[::3]
    assert noise[0].count("<figcaption>") == 6  # the noise has none
    table = shown["Images made for a class (made): who recognises it"].table
    assert table is not None and table.columns[1:] == ["predicted by it", "its confidence", str(other)]
    assert all(len(cells) == 3 for _, cells in table.rows)


def test_units_are_named_with_what_became_of_them(two: list[Facts], shown: dict[str, Figure]) -> None:
    start, first, second = shown["Images that excite units (classes)"].panels
    assert len(sources(start)) == len(sources(first)) == len(sources(second)) == 3
    assert re.findall(r"<figcaption>(\w+)\n", first) == ["red", "green", "blue"]
    assert re.findall(r"<figcaption>(\w+)\n", shown["Images that excite units (units)"].panels[0]) == ["3", "1"]


def test_gradients_have_pictures_curves_and_a_table(two: list[Facts], shown: dict[str, Figure]) -> None:
    assert all(len(sources(panel)) == 3 * 6 for panel in shown["Input gradients as pictures (saliency)"].panels)
    numbers = shown["Input gradients (saliency)"]
    assert len(numbers.panels) == 2 and numbers.table is not None
    alignment = two[0].estimate(two[0].columns["saliency/alignment"])
    assert numbers.table.rows[0][1][0] == quantity_cell(alignment)


def test_accuracies_over_the_cut_off_are_those_of_the_facts(two: list[Facts], shown: dict[str, Figure]) -> None:
    low, high = shown["Accuracy on filtered images (filters)"].panels
    assert "low-passed: accuracy over cut-off (cycles per pixel)" in low and "high-passed" in high
    under = shown["Accuracy under filtered perturbations, ℓ∞ ≤ 4/255 (filters)"]
    for panel in (low, high, *under.panels):
        assert {"--run-0", "--run-1"} <= set(re.findall(r"var\((--[\w-]+)\)", panel))
        assert not re.search(r"#[0-9a-f]{6}", panel)


def test_without_pictures_the_numbers_are_shown(tmp_path: Path, data: DataSet, other: Path) -> None:
    facts = measure(other, data, suite(other), folder=tmp_path, limit=4, keep=0)
    titles = set(drawn([facts]))
    assert "Perturbations by frequency (pert, ℓ∞ ≤ 4/255)" in titles and "Input gradients (saliency)" in titles
    assert not any("as pictures" in title for title in titles)


def test_a_page_has_every_id_once(two: list[Facts], tmp_path: Path) -> None:
    page = report([facts.run.folder for facts in two], tmp_path / "report.html").read_text()
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert 'class="pictures"' in page


@pytest.mark.parametrize("shape", [(32, 32), (9, 6), (224, 224)])
def test_white_noise_has_the_rings_of_the_probes(shape: tuple[int, int]) -> None:
    """One bright pixel has a flat spectrum."""
    pixel = torch.zeros(1, 1, *shape)
    pixel[0, 0, 1, 2] = 1
    assert np.allclose(white_noise(*shape, 16), energy_shares(pixel, 16)[0].numpy(), atol=1e-12)


def test_examples_without_energy_do_not_count(tmp_path: Path) -> None:
    energy = np.array([[0.25, 0.75], [np.nan, np.nan], [0.75, 0.25]], dtype=np.float32)
    facts = measure_cases(
        create_run(tmp_path / "run", seed=0), {"saliency": {"role": "analysis", "columns": {"energy": energy}}}
    )
    assert [(each.value, each.n) for each in by_ring(facts, energy)] == [(0.5, 2), (0.5, 2)]


def test_grey_is_the_luma() -> None:
    red = np.zeros((3, 1, 1), np.uint8)
    red[0] = 255
    assert grey(red).tolist() == [[[76]]]  # 0.299 · 255
    assert grey(np.full((3, 2, 2), 128, np.uint8)).tolist() == [[[128, 128], [128, 128]]]
    assert grey(np.full((1, 2, 2), 7, np.uint8)).tolist() == [[[7, 7], [7, 7]]]


def test_captions_and_names_are_text_to_the_page() -> None:
    evil = "<script>alert(1)</script>"
    panel = grid(0, evil, [Picture("data:,", evil, "wrong")], columns=[evil], about=evil)
    assert "<script>" not in panel + figure(Picture("data:,"), evil)
    assert panel.count('<span class="wrong">✗</span>') == 1


def test_an_interval_of_a_share_ends_where_shares_do() -> None:
    assert share_cell(Estimate(0.98, 0.95, 1.01, 9)) == "<b>98.0 %</b><small>95.0–100.0</small>"

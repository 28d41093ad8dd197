"""Folders of ImageNet's classes that its models are only measured on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from timm.data import ImageNetInfo
from torch import nn

from bastion import measure
from bastion.data import datasets
from bastion.data.loader import batch_layout
from bastion.data.pool import Pool
from bastion.errors import BastionError
from bastion.measuring.facts import read_measurements
from bastion.reporting.html import report

IDS = ImageNetInfo("imagenet-1k").label_names()


def write(root: Path, folders: list[str], columns: list[int]) -> Path:
    """One picture of each class, whose red and green say its column: 256 · green + red."""
    for folder, column in zip(folders, columns, strict=True):
        (root / folder).mkdir(parents=True)
        Image.new("RGB", (8, 8), (column % 256, column // 256, 0)).save(root / folder / "0.png")
    return root


class ReadsTheColumn(nn.Module):
    """Right on every picture of `write`: of 1,000 classes the one whose number the colours are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        red, green = (255 * x[:, :2, 4, 4]).unbind(1)
        return -(red + 256 * green - torch.arange(1000)[:, None]).abs().T


@pytest.mark.parametrize(("name", "count"), [("imagenet-a", 200), ("imagenet-r", 200), ("imagenet-sketch", 1000)])
def test_a_model_of_1000_classes_is_measured_on_folders_of_ids(
    cache: Path, tmp_path: Path, name: str, count: int
) -> None:
    columns = list(range(0, 1000, 1000 // count))
    write(cache / name, [IDS[column] for column in columns], columns)
    data = datasets.build({"name": name, "size": 8})
    assert (data.name, len(data.test), len(data.train), data.columns) == (name, count, 0, tuple(columns))
    facts = measure(ReadsTheColumn(), {"name": name, "size": 8}, "natural", folder=tmp_path / "run")
    assert facts.accuracies()["clean"].value == 1
    assert facts.columns["clean/prediction"].max() == count - 1


def test_imagenet_v2_has_numbers_for_folders(cache: Path, tmp_path: Path) -> None:
    """In the order of their names, 10 before 2, they are not the model's classes: the map puts them right."""
    write(cache / "imagenet-v2", [str(number) for number in range(1000)], list(range(1000)))
    facts = measure(ReadsTheColumn(), {"name": "imagenet-v2", "size": 8}, "natural", folder=tmp_path / "run")
    assert facts.accuracies()["clean"].value == 1


def test_mean_confidence_is_that_of_the_predicted_classes(cache: Path, tmp_path: Path) -> None:
    root = write(tmp_path / "val", [IDS[column] for column in (3, 500)], [3, 500])
    spec = {"name": "imagenet-val", "root": str(root), "size": 8}
    facts = measure(ReadsTheColumn(), spec, "natural", folder=tmp_path / "run")
    assert facts.numbers()["mean confidence"].value == pytest.approx(1.0)  # logits 0 and -497


def test_pictures_that_cannot_be_read_are_noted_in_the_measurement_and_on_its_page(tmp_path: Path) -> None:
    root = write(tmp_path / "val", IDS[:3], [0, 1, 2])
    (root / IDS[1] / "broken.png").write_bytes(b"")
    spec = {"name": "imagenet-val", "root": str(root), "size": 8, "on_error": "skip"}
    facts = measure(ReadsTheColumn(), spec, {"probes": {"clean": "accuracy"}}, folder=tmp_path / "run")
    note = f"1 pictures of the data set cannot be read and are left out: {IDS[1]}/broken.png"
    assert facts.n == 3 and f"note: {note}" in facts.table()
    assert read_measurements(facts.run)[0].about.skipped == (f"{IDS[1]}/broken.png",)
    page = report([tmp_path / "run"], tmp_path / "report.html")
    assert note in page.read_text()


def test_another_number_of_classes_is_told(cache: Path, tmp_path: Path) -> None:
    root = write(tmp_path / "some", IDS[:3], [0, 1, 2])
    with pytest.raises(
        BastionError, match="data set 'imagenet-a': has 200 classes, .*some has 3; give the right folder"
    ):
        datasets.build({"name": "imagenet-a", "root": str(root)})
    with pytest.raises(BastionError, match="data set 'imagenet-r' is not in .*; put it there as .*imagenet-r/CLASS/"):
        datasets.build("imagenet-r")
    assert len(datasets.build({"name": "imagenet-val", "root": str(root)}).classes) == 3


def test_a_class_map_does_not_turn_the_order_of_training(tmp_path: Path) -> None:
    """A model trained on them has the folders' order: as many outputs as a model of the map's, in another order."""
    root = write(tmp_path / "numbers", [str(number) for number in range(11)], list(range(11)))
    for folder in root.iterdir():
        Image.new("RGB", (8, 8)).save(folder / "1.png")
    spec = {"name": "imagefolder", "root": str(root), "size": 8, "class_map": "imagenet"}
    with pytest.raises(BastionError, match="in another order than those of the folders' names.*set test_only: true"):
        datasets.build(spec)
    assert datasets.build({**spec, "test_only": True}).columns == (0, 1, 10, *range(2, 10))


def test_only_the_test_folder_is_taken_where_there_is_one(tmp_path: Path) -> None:
    write(tmp_path / "train", IDS[:2], [0, 1])
    write(tmp_path / "val", IDS[:3], [0, 1, 2])
    data = datasets.build({"name": "imagefolder", "root": str(tmp_path), "size": 8, "test_only": True})
    assert (len(data.train), len(data.val), len(data.test)) == (0, 0, 3)
    with pytest.raises(BastionError, match="imagefolder has no images in its train split; measure another one"):
        measure(ReadsTheColumn(), data, "natural", split="train", folder=tmp_path / "run")


def test_there_is_nothing_to_train_on(tmp_path: Path) -> None:
    write(tmp_path, IDS[:3], [0, 1, 2])
    data = datasets.build({"name": "imagefolder", "root": str(tmp_path), "size": 8, "test_only": True})
    with pytest.raises(BastionError, match="batch: 2 is more than the 0 training images; choose data to train on"):
        batch_layout(Pool(data.train), 2)


def test_settings_that_contradict_are_told(tmp_path: Path) -> None:
    with pytest.raises(BastionError, match="test_only and subset say what is tested on: they do not go with training_"):
        datasets.build({"name": "imagefolder", "root": str(tmp_path), "test_only": True, "training_only": True})
    with pytest.raises(BastionError, match="nowhere: no such folder; it must be a folder of class folders"):
        datasets.build({"name": "imagefolder", "root": str(tmp_path / "nowhere"), "test_only": True})


def test_imagenette_and_imagenet_100_are_classes_of_imagenet(cache: Path) -> None:
    ten = [0, 217, 482, 491, 497, 566, 569, 571, 574, 701]
    for part in ("train", "val"):
        write(cache / "imagenette" / part, [IDS[column] for column in ten], ten)
        write(cache / "imagenet-100" / part, IDS[100:200], list(range(100, 200)))
    assert datasets.build({"name": "imagenette", "size": 8, "class_map": "imagenet"}).columns == tuple(ten)
    names = IDS[199:99:-1]
    data = datasets.build({"name": "imagenet-100", "size": 8, "class_map": "imagenet", "classes": names})
    assert data.columns == tuple(range(199, 99, -1))

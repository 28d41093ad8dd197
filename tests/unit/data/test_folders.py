"""Data sets that are folders, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from bastion.data import datasets
from bastion.errors import BastionError
from bastion.types import DataSet


def write(root: Path, classes: int, *, test: str | None = "val", count: int = 2) -> Path:
    """`count` tiny pictures of each class to train on and one to test on; the colour is the class."""
    for part in ("train", test) if test else (".",):
        for label in range(classes):
            folder = root / part / f"n{label:04}"
            folder.mkdir(parents=True)
            for number in range(1 if part == test else count):
                Image.new("RGB", (8, 8), (label % 256, label // 256, number)).save(folder / f"{number}.png")
    return root


def colour_is_class(data: DataSet) -> bool:
    """Is each picture of the class that its label names?"""
    for split in (data.train, data.val, data.test):
        batch = split.batch(range(len(split)))
        red, green = ((batch.x[:, channel, 2, 2] * 255).round().long() for channel in (0, 1))
        named = torch.tensor([int(data.classes[label][1:]) for label in batch.y.tolist()])
        if not torch.equal(red + 256 * green, named):
            return False
    return True


def test_a_data_set_is_found_in_the_cache_folder_by_its_name(cache: Path) -> None:
    write(cache / "imagenette", 10)
    data = datasets.build({"name": "imagenette", "size": 8})
    assert (data.name, data.shape, len(data.classes)) == ("imagenette", (3, 8, 8), 10)
    assert (len(data.train), len(data.val), len(data.test)) == (10, 10, 10)
    assert colour_is_class(data)


def test_a_data_set_is_found_where_the_recipe_says(cache: Path, tmp_path: Path) -> None:
    root = write(tmp_path / "elsewhere", 102, test="test")
    (root / "val").mkdir()  # its own validation images, which are not measured
    assert datasets.build({"name": "flowers102", "root": str(root), "size": 8}).name == "flowers102"


@pytest.mark.parametrize("name", ["imagenet", "imagenet-100", "imagenette", "flowers102", "caltech101"])
def test_what_is_not_there_is_said_with_what_to_put_where(cache: Path, name: str) -> None:
    test = "test" if name == "flowers102" else "val"
    with pytest.raises(BastionError) as error:
        datasets.build(name)
    assert str(error.value) == (
        f"data set '{name}' is not in {cache}; put it there as {cache}/{name}/train/CLASS/*.jpg and "
        f"{cache}/{name}/{test}/CLASS/*.jpg, or say with data.root which folder has it"
    )


def test_a_folder_with_other_classes_is_refused(cache: Path) -> None:
    write(cache / "imagenet", 3)
    with pytest.raises(BastionError, match="data set 'imagenet': has 1000 classes, this folder has 3; give the right"):
        datasets.build("imagenet")
    with pytest.raises(BastionError, match="data set 'imagenet-100': has 100 classes, this folder has 3"):
        datasets.build("imagenet-100")


@pytest.mark.parametrize("classes", [101, 102])
def test_caltech_may_have_the_background(cache: Path, classes: int) -> None:
    write(cache / "caltech101", classes, test=None, count=3)
    data = datasets.build({"name": "caltech101", "size": 8})
    assert (len(data.classes), len(data.test)) == (classes, classes)


class TestImageNet100:
    @pytest.fixture
    def imagenet(self, cache: Path) -> Path:
        """110 classes are enough to choose from."""
        return write(cache / "imagenet", 110)

    def test_a_hundred_classes_are_drawn_and_numbered_anew(self, imagenet: Path) -> None:
        data = datasets.build({"name": "imagenet-100", "size": 8})
        assert data.name == "imagenet-100"
        assert len(data.classes) == 100
        assert list(data.classes) == sorted(data.classes)
        assert list(data.classes) != [f"n{number:04}" for number in range(100)]
        for split in (data.train, data.val, data.test):
            assert split.labels.tolist().count(0) == 1
            assert sorted(split.labels.tolist()) == list(range(100))
        assert colour_is_class(data)
        assert colour_is_class(DataSet(**{**vars(data), "train": data.train.subset([5, 17, 3])}))
        assert len(data.train.subset([])) == 0

    def test_the_draw_is_always_the_same(self, imagenet: Path) -> None:
        first, second = (datasets.build({"name": "imagenet-100", "size": 8}) for _ in range(2))
        assert (first.classes, first.fingerprint) == (second.classes, second.fingerprint)

    def test_pictures_keep_their_numbers(self, imagenet: Path) -> None:
        """What is held out of ImageNet is held out of its part too."""
        part = datasets.build({"name": "imagenet-100", "size": 8})
        whole = datasets.build({"name": "imagefolder", "root": str(imagenet), "size": 8})
        assert set(part.val.index.tolist()) < set(whole.val.index.tolist())
        assert (
            part.train.image(7).tobytes()
            == whole.train.image(whole.train.index.tolist().index(part.train.index[7])).tobytes()
        )

    def test_the_classes_may_be_named(self, imagenet: Path) -> None:
        names = [f"n{number:04}" for number in reversed(range(10, 110))]
        data = datasets.build({"name": "imagenet-100", "classes": names, "size": 8})
        assert data.classes == tuple(names)
        assert colour_is_class(data)
        assert data.fingerprint != datasets.build({"name": "imagenet-100", "size": 8}).fingerprint

    def test_a_folder_of_its_own_comes_first(self, imagenet: Path, cache: Path) -> None:
        write(cache / "imagenet-100", 100)
        data = datasets.build({"name": "imagenet-100", "size": 8})
        assert data.classes == tuple(f"n{number:04}" for number in range(100))

    @pytest.mark.parametrize(
        ("classes", "message"),
        [
            (["n0001"], "classes: expected 100 of ImageNet's folder names, got 1"),
            ([f"n{number:04}" for number in range(99)] + ["n0500"], "data set 'imagenet-100': no class 'n0500'"),
            ([f"n{number:04}" for number in range(99)] + ["n0003"], "a class is chosen twice among 100"),
        ],
    )
    def test_names_must_be_a_hundred_that_there_are(self, imagenet: Path, classes: list[str], message: str) -> None:
        with pytest.raises(BastionError, match=message):
            datasets.build({"name": "imagenet-100", "classes": classes, "size": 8})

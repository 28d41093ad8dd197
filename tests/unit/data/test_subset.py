"""Lists of pictures to measure on."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path

import pytest
from test_imagefolder import write_pictures

from bastion.data import datasets, subset
from bastion.errors import BastionError
from bastion.types import DataSet

LISTED = ["cat/002.png", "dog/000.png", "cat/001.png"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pictures(tmp_path / "pictures", ("cat", "dog"), 4)
    return tmp_path / "pictures"


def build(folder: Path, listed: list[str] | None, **settings: object) -> DataSet:
    path = folder.parent / "list.txt"
    path.write_text("\n".join(listed or []))
    return datasets.build({"name": "imagefolder", "root": str(folder), "size": 8, "subset": str(path), **settings})


def test_the_list_gives_the_pictures_and_their_order(folder: Path) -> None:
    data = build(folder, LISTED, test_only=True)
    shown = [data.test.image(position).getpixel((0, 0))[:2] for position in range(3)]
    assert shown == [(0, 2), (1, 0), (0, 1)]
    assert data.test.labels.tolist() == [0, 1, 0]


def test_the_list_is_part_of_the_fingerprint(folder: Path) -> None:
    others = (LISTED, LISTED[::-1], LISTED[:2])
    assert len({build(folder, listed, test_only=True).fingerprint for listed in others}) == 3


def test_what_is_trained_on_is_not_measured(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(BastionError, match=r"\d of the 3 pictures of the list are not in .*pictures: "):
        build(folder, ["cat/000.png", "cat/001.png", "cat/002.png"])
    write_pictures(tmp_path / "parted/train", ("cat", "dog"), 3)
    write_pictures(tmp_path / "parted/val", ("cat", "dog"), 4)
    assert len(build(tmp_path / "parted", LISTED).test) == 3


def test_missing_pictures_are_told(folder: Path) -> None:
    listed = [*LISTED, *(f"cat/{number}.png" for number in range(5))]
    with pytest.raises(
        BastionError, match=r"5 of the 8 pictures of the list are not in .*: cat/0.png, .*png …; comple"
    ):
        build(folder, listed, test_only=True)


def test_lists_that_say_nothing_are_refused(folder: Path) -> None:
    with pytest.raises(BastionError, match="list.txt is empty; expected one path a line"):
        build(folder, [], test_only=True)
    with pytest.raises(BastionError, match="list.txt names a picture twice"):
        build(folder, [*LISTED, LISTED[0]], test_only=True)
    with pytest.raises(
        BastionError, match=r"no file robustbnch, and no list of this name; did you mean 'robustbench'\?"
    ):
        datasets.build({"name": "imagefolder", "root": str(folder), "test_only": True, "subset": "robustbnch"})


@pytest.fixture
def robustbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with the file, on the path."""
    path = tmp_path / "site/robustbench/helper_files/imagenet_test_image_ids.txt"
    path.parent.mkdir(parents=True)
    (tmp_path / "site/robustbench/__init__.py").write_text("raise ImportError('it needs much else')")
    path.write_text("\n".join(LISTED))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(subset, "_ROBUSTBENCH_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_robustbenchs_list_is_found_in_its_package_without_importing_it(robustbench: Path, folder: Path) -> None:
    spec = {"name": "imagefolder", "root": str(folder), "size": 8, "test_only": True, "subset": "robustbench"}
    assert datasets.build(spec).test.labels.tolist() == [0, 1, 0]
    assert "robustbench" not in sys.modules
    robustbench.write_text("\n".join(LISTED[::-1]))
    with pytest.raises(BastionError, match="is not RobustBench's list: SHA-256 .*, expected .*; install robustbench"):
        datasets.build(spec)


@pytest.mark.skipif(importlib.util.find_spec("robustbench") is not None, reason="robustbench is installed")
def test_without_the_package_it_is_said_where_the_list_is(folder: Path) -> None:
    with pytest.raises(BastionError, match="robustbench is not installed; `pip install --no-deps robustbench` has the"):
        datasets.build({"name": "imagefolder", "root": str(folder), "test_only": True, "subset": "robustbench"})


@pytest.mark.skipif(importlib.util.find_spec("robustbench") is None, reason="robustbench is not installed")
def test_the_real_list_has_5000_pictures() -> None:
    paths, _ = subset.read_subset("robustbench")
    assert (len(paths), paths[0]) == (5000, "n09468604/ILSVRC2012_val_00015253.JPEG")

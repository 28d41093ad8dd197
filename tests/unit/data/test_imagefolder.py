from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bastion.data import datasets
from bastion.data.imagefolder import list_pictures
from bastion.data.picture import read_picture
from bastion.data.user_data import as_data
from bastion.errors import BastionError
from bastion.types import DataSet, Split

CLASSES = ("cat", "dog", "train")


def write_pictures(folder: Path, classes: tuple[str, ...], count: int, *, side: int = 20) -> None:
    """Pictures of one colour each; the red channel is the class, the green one the number."""
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            picture = Image.new("RGB", (side, side + 4), (label, number, 200))
            picture.save(folder / name / f"{number:03}.png")


def build(root: Path, **parameters: object) -> DataSet:
    return datasets.build({"name": "imagefolder", "root": str(root), "size": 8, **parameters})


@pytest.mark.parametrize("test_name", ["val", "validation", "test"])
def test_train_and_test_folders_are_found(tmp_path: Path, test_name: str) -> None:
    write_pictures(tmp_path / "train", CLASSES, 20)
    write_pictures(tmp_path / test_name, CLASSES, 3)
    data = build(tmp_path)
    assert data.classes == CLASSES
    assert (len(data.train), len(data.val), len(data.test)) == (54, 6, 9)
    assert sorted([*data.train.index.tolist(), *data.val.index.tolist()]) == list(range(60))
    assert torch.equal(data.test.index, torch.arange(9))
    assert data.shape == (3, 8, 8)


def test_class_folders_alone_give_a_fifth_of_each_class_for_testing(tmp_path: Path) -> None:
    write_pictures(tmp_path, CLASSES, 20)
    data = build(tmp_path)
    assert data.test.labels.bincount().tolist() == [4, 4, 4]
    assert data.val.labels.bincount().tolist() == [2, 2, 2]
    assert data.train.labels.bincount().tolist() == [14, 14, 14]
    every = [*data.train.index.tolist(), *data.val.index.tolist(), *data.test.index.tolist()]
    assert sorted(every) == list(range(60))


def test_pixels_and_labels_belong_together(tmp_path: Path) -> None:
    write_pictures(tmp_path, CLASSES, 20)
    for split in (build(tmp_path).train, build(tmp_path).test):
        batch = split.batch(range(len(split)))
        assert batch.x.dtype == torch.float32
        assert batch.x.is_contiguous()
        assert torch.equal((batch.x[:, 0, 4, 4] * 255).round().long(), batch.y)
        assert torch.equal(batch.x[:, 2], torch.full_like(batch.x[:, 2], 200 / 255))
        assert torch.equal(batch.index, split.index)


def test_the_first_pictures_are_a_fair_sample(tmp_path: Path) -> None:
    """By name the first 60 of 300 would be of one class only."""
    write_pictures(tmp_path, CLASSES, 100, side=2)
    first = list_pictures(tmp_path).labels[:60]
    assert first.bincount(minlength=3).min() >= 10


def test_the_order_is_that_of_the_hashes_of_the_paths(tmp_path: Path) -> None:
    write_pictures(tmp_path, CLASSES, 2)
    paths = [path for path, _ in list_pictures(tmp_path).files]
    assert paths == ["train/000.png", "cat/000.png", "dog/001.png", "cat/001.png", "dog/000.png", "train/001.png"]


def test_subsets_keep_index_label_and_picture(tmp_path: Path) -> None:
    write_pictures(tmp_path, CLASSES, 20)
    train = build(tmp_path).train
    part = train.subset([5, 3]).subset([1])
    assert part.index.tolist() == [train.index[3]]
    assert np.array_equal(np.asarray(part.image(0)), np.asarray(train.image(3)))
    assert torch.equal(part.batch([0]).x, train.batch([3]).x)


def test_measured_pictures_are_the_centre_of_the_resized_ones(tmp_path: Path) -> None:
    """A picture whose shorter side is size / crop_pct already is only cropped, to the pixel."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 100, 3), dtype=np.uint8)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.fromarray(noise).save(tmp_path / name / f"{number}.png")
    x = build(tmp_path, size=56, crop_pct=0.875).test.batch([0]).x
    centre = torch.from_numpy(noise[4:60, 22:78].copy()).permute(2, 0, 1)
    assert torch.equal(x[0], centre.float() / 255)
    assert build(tmp_path).test.image(0).size == (100, 64), "`image` is the stored picture"


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_every_kind_of_picture_becomes_rgb(tmp_path: Path, mode: str) -> None:
    write_pictures(tmp_path, ("a", "b"), 2)
    suffix = "jpg" if mode == "CMYK" else "png"
    Image.new("RGB", (20, 20), (10, 10, 10)).convert(mode).save(tmp_path / "a" / f"odd.{suffix}")
    for path in (tmp_path / "a").glob("0*.png"):
        path.unlink()
    Image.new("RGB", (20, 20), (10, 10, 10)).convert(mode).save(tmp_path / "a" / f"odder.{suffix}")
    data = build(tmp_path)
    where = (data.test.labels == 0).nonzero().flatten().tolist()
    assert data.test.image(where[0]).mode == "RGB"
    assert data.test.batch(where).x.mean().item() == pytest.approx(10 / 255, abs=0.01)


def test_a_broken_picture_is_named(tmp_path: Path) -> None:
    write_pictures(tmp_path, ("a", "b"), 2)
    for path in tmp_path.glob("*/*.png"):
        path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(BastionError, match=r"\d+\.png: not a readable picture .*; repair or remove it"):
        build(tmp_path).test.batch([0])


def test_broken_pictures_may_be_skipped_and_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pictures(tmp_path, ("a", "b"), 5)
    whole = build(tmp_path, on_error="skip")
    assert capsys.readouterr().err == "" and whole.fingerprint == build(tmp_path).fingerprint
    path = tmp_path / "b" / "003.png"
    path.write_bytes(path.read_bytes()[:40])
    data = build(tmp_path, on_error="skip")
    assert capsys.readouterr().err == "skipped 1 pictures that cannot be read: b/003.png\n"
    kept, all_ = ([len(getattr(each, name)) for name in ("train", "val", "test")] for each in (data, whole))
    assert sum(kept) == sum(all_) - 1 and all(a - b in (0, 1) for a, b in zip(all_, kept, strict=True))
    assert data.fingerprint != build(tmp_path).fingerprint and data.skipped == ("b/003.png",)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())  # in a worker
    assert build(tmp_path, on_error="skip").skipped == data.skipped and capsys.readouterr().err == ""


def test_the_fingerprint_follows_names_sizes_and_the_view(tmp_path: Path) -> None:
    write_pictures(tmp_path, CLASSES, 5)
    seen = {build(tmp_path).fingerprint, build(tmp_path).fingerprint}
    assert len(seen) == 1
    seen.add(build(tmp_path, size=16).fingerprint)
    path = tmp_path / "cat" / "003.png"
    path.rename(path.with_name("x.png"))
    seen.add(build(tmp_path).fingerprint)
    path.with_name("x.png").write_bytes(b"shorter")
    seen.add(build(tmp_path).fingerprint)
    assert len(seen) == 4


def test_what_is_no_picture_is_passed_over(tmp_path: Path) -> None:
    write_pictures(tmp_path, CLASSES, 5)
    before = build(tmp_path).fingerprint
    (tmp_path / "cat" / "notes.txt").write_text("x")
    (tmp_path / "cat" / ".hidden.png").write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / "README").write_text("x")
    assert build(tmp_path).fingerprint == before


def test_train_and_test_must_have_the_same_classes(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", ("a", "b", "c"), 2)
    write_pictures(tmp_path / "val", ("a", "b", "d"), 2)
    with pytest.raises(BastionError, match=r"train and val must have the same .* only: c, d \(2 in all\)"):
        build(tmp_path)


def test_of_several_test_folders_one_must_be_named(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", ("a", "b"), 2)
    write_pictures(tmp_path / "val", ("a", "b"), 3)
    write_pictures(tmp_path / "test", ("a", "b"), 4)
    with pytest.raises(BastionError, match="has val and test; say which one is measured with `test_folder`"):
        build(tmp_path)
    assert len(build(tmp_path, test_folder="test").test) == 8


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ((), "root: no such folder"),
        (("",), "root: no class folders in it"),
        (("a", "b"), "a: no pictures"),
        (("train/a",), "has `train` but none of val, validation, test; give .*train as `root` to test on 20 %"),
    ],
)
def test_a_folder_of_another_layout_is_explained(tmp_path: Path, made: tuple[str, ...], message: str) -> None:
    for name in made:
        (tmp_path / "root" / name).mkdir(parents=True)
        if name.startswith("train"):
            write_pictures(tmp_path / "root" / name, ("x",), 2)
    with pytest.raises(BastionError, match=message):
        build(tmp_path / "root")


def test_a_class_of_one_picture_cannot_be_split(tmp_path: Path) -> None:
    write_pictures(tmp_path, ("a", "b"), 1)
    with pytest.raises(BastionError, match="a: one picture; training and testing need one each"):
        build(tmp_path)


def test_bad_parameters_are_explained(tmp_path: Path) -> None:
    write_pictures(tmp_path, ("a", "b"), 2)
    with pytest.raises(BastionError, match=r"\.size: input should be greater than or equal to 1, got 0"):
        build(tmp_path, size=0)
    with pytest.raises(BastionError, match=r"\.crop_pct: input should be less than or equal to 1, got 1\.5"):
        build(tmp_path, crop_pct=1.5)


def _pixels(split: Split) -> set[tuple[int, int]]:
    """Class and number of each picture, which its colours tell."""
    return {split.image(position).getpixel((0, 0))[:2] for position in range(len(split))}


class TestExtraPictures:
    """Folders that are trained on beside another one."""

    @pytest.mark.parametrize("layout", ["class folders", "train and val"])
    def test_the_same_paths_are_split_alike(self, tmp_path: Path, layout: str) -> None:
        for name in ("originals", "copies"):
            if layout == "class folders":
                write_pictures(tmp_path / name, CLASSES, 20, side=20 if name == "originals" else 9)
            else:
                write_pictures(tmp_path / name / "train", CLASSES, 20, side=20 if name == "originals" else 9)
                write_pictures(tmp_path / name / "val", CLASSES, 3)
        originals, copies = build(tmp_path / "originals"), build(tmp_path / "copies")
        assert _pixels(originals.train) == _pixels(copies.train)
        assert _pixels(originals.val) == _pixels(copies.val)
        assert originals.fingerprint != copies.fingerprint

    @pytest.mark.parametrize("layout", ["class folders", "train and val"])
    def test_copies_of_what_is_held_out_are_left_out(self, tmp_path: Path, layout: str) -> None:
        """Although copies are missing, which alone would split the others anew, and are in another format."""
        originals = tmp_path / "originals"
        write_pictures(originals if layout == "class folders" else originals / "train", CLASSES, 20)
        if layout == "train and val":
            write_pictures(originals / "val", CLASSES, 3)
            write_pictures(originals / "test", CLASSES, 3)  # which of the two is tested on does not matter here
        write_pictures(tmp_path / "copies", CLASSES, 20)
        lost = [("cat", 3), ("cat", 11), ("dog", 4)]
        for name, number in lost:
            (tmp_path / "copies" / name / f"{number:03}.png").unlink()
        for path in (tmp_path / "copies" / "train").iterdir():
            path.rename(path.with_suffix(".PNG"))
        data = build(originals, **({"test_folder": "val"} if layout == "train and val" else {}))
        copies = build(tmp_path / "copies", copies_of=str(originals))
        assert _pixels(copies.train) == _pixels(data.train) - {(CLASSES.index(name), number) for name, number in lost}
        assert len(copies.train) == len(_pixels(copies.train)) > 36
        assert (len(copies.val), len(copies.test)) == (0, 0)
        assert torch.equal(copies.train.batch([2]).y, copies.train.labels[[2]])
        wrong = build(tmp_path / "copies")
        assert _pixels(wrong.train) & _pixels(data.val), "the test would not see a leak"

    def test_of_originals_that_differ_in_the_suffix_one_that_is_held_out_counts(self, tmp_path: Path) -> None:
        write_pictures(tmp_path / "originals", ("a", "b"), 20)
        write_pictures(tmp_path / "copies", ("a", "b"), 20)
        held = build(tmp_path / "originals").val
        for name in ("a", "b"):
            for number in range(20):
                Image.new("RGB", (9, 9)).save(tmp_path / "originals" / name / f"{number:03}.webp")
        data = build(tmp_path / "originals")
        listing = list_pictures(tmp_path / "originals")
        out = {*range(80)} - {*data.train.index.tolist()}
        stems = {listing.files[row][0].rpartition(".")[0] for row in out}
        copies = build(tmp_path / "copies", copies_of=str(tmp_path / "originals"))
        assert len(copies.train) == 40 - len(stems) < 40 - len(held)

    def test_a_copy_without_an_original_is_an_error(self, tmp_path: Path) -> None:
        write_pictures(tmp_path / "originals", CLASSES, 5)
        write_pictures(tmp_path / "copies", CLASSES, 6)
        with pytest.raises(
            BastionError, match=r"3 pictures, such as \w+/005.png, have no original in .*originals; remove"
        ):
            build(tmp_path / "copies", copies_of=str(tmp_path / "originals"))

    def test_all_can_be_trained_on(self, tmp_path: Path) -> None:
        """A class of one picture too; `train` is found, and a folder without `val` beside it is none the worse."""
        write_pictures(tmp_path / "a", CLASSES, 1)
        write_pictures(tmp_path / "b" / "train", CLASSES, 4)
        for root, count in ((tmp_path / "a", 3), (tmp_path / "b", 12)):
            data = build(root, training_only=True)
            assert (len(data.train), len(data.val), len(data.test)) == (count, 0, 0)
            assert data.classes == CLASSES

    def test_the_fingerprint_follows_what_is_held_out_of_the_originals(self, tmp_path: Path) -> None:
        write_pictures(tmp_path / "few", CLASSES, 20)
        write_pictures(tmp_path / "many", CLASSES, 40)
        write_pictures(tmp_path / "copies", CLASSES, 20)
        options: list[dict[str, object]] = [
            {},
            {"training_only": True},
            {"copies_of": str(tmp_path / "few")},
            {"copies_of": str(tmp_path / "many")},
        ]
        assert len({build(tmp_path / "copies", **each).fingerprint for each in options}) == 4

    def test_a_test_folder_makes_no_sense_then(self, tmp_path: Path) -> None:
        write_pictures(tmp_path, CLASSES, 5)
        with pytest.raises(BastionError, match="test_folder has no use here"):
            build(tmp_path, test_folder="val", training_only=True)


def test_pictures_of_16_bits_are_refused_not_read_as_white(tmp_path: Path) -> None:
    grey = Image.fromarray(np.linspace(0, 65535, 64).reshape(8, 8).astype(np.uint16))
    grey.save(tmp_path / "grey.png")
    with pytest.raises(BastionError, match=r"grey\.png: not a readable picture \(its pixels have more than 8 bits"):
        read_picture(tmp_path / "grey.png")
    with pytest.raises(BastionError, match="more than 8 bits"):
        as_data(([grey], [0]))

"""A .npz file is a data set of training images; what is none of it is refused in one line."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bastion.data import datasets
from bastion.errors import BastionError
from bastion.types import DataSet

NOISE = np.random.default_rng(0)
IMAGES = NOISE.integers(0, 256, (12, 6, 5, 3), dtype=np.uint8)
LABELS = np.arange(12) % 4


def write(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def build(path: Path, **options: Any) -> DataSet:
    return datasets.build({"name": "npz", "path": str(path), **options}, "extra.data")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "some.npz", image=IMAGES, label=LABELS)


def test_all_images_are_for_training(file: Path) -> None:
    data = build(file)
    assert (len(data.train), len(data.val), len(data.test)) == (12, 0, 0)
    assert data.classes == ("0", "1", "2", "3")
    assert data.shape == (3, 6, 5)
    batch = data.train.batch(range(12))
    assert torch.equal((batch.x * 255).round().byte().permute(0, 2, 3, 1), torch.from_numpy(IMAGES))
    assert torch.equal(batch.y, torch.from_numpy(LABELS))
    assert batch.y.dtype == torch.int64
    assert torch.equal(batch.index, torch.arange(12))
    assert np.array_equal(np.asarray(data.train.image(7)), IMAGES[7])
    assert data.mean == pytest.approx((IMAGES / 255).mean((0, 1, 2)).tolist(), abs=1e-6)
    assert data.std == pytest.approx((IMAGES / 255).std((0, 1, 2)).tolist(), abs=1e-6)


def test_mean_and_std_of_many_images_are_those_of_an_even_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.npz", image=IMAGES, label=LABELS)
    monkeypatch.setattr("bastion.data.npz._SAMPLED", IMAGES.size // 3)
    assert build(path).mean == pytest.approx((IMAGES[::3] / 255).mean((0, 1, 2)).tolist(), abs=1e-6)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint16, np.uint64])
def test_any_integers_are_labels(tmp_path: Path, dtype: type) -> None:
    path = write(
        tmp_path / "a.npz", image=IMAGES, label=(300 * (LABELS > 1)).astype(dtype) if dtype != np.uint8 else LABELS
    )
    data = build(path)
    assert len(data.classes) == (4 if dtype == np.uint8 else 301)
    assert data.train.labels.dtype == torch.int64


@pytest.mark.parametrize("shape", [(12, 6, 5), (12, 6, 5, 1)])
def test_grey_images_have_one_channel(tmp_path: Path, shape: tuple[int, ...]) -> None:
    grey = IMAGES[..., 0].reshape(shape)
    data = build(write(tmp_path / "a.npz", image=grey, label=LABELS))
    assert data.shape == (1, 6, 5)
    assert data.train.image(0).mode == "L"
    assert torch.equal((data.train.batch([3]).x[0, 0] * 255).round().byte(), torch.from_numpy(IMAGES[3, :, :, 0]))


def test_classes_may_be_more_than_those_seen(file: Path) -> None:
    data = build(file, classes=10)
    assert len(data.classes) == 10
    assert data.fingerprint != build(file).fingerprint


def test_the_fingerprint_follows_pixels_and_labels(tmp_path: Path) -> None:
    changed, relabelled = IMAGES.copy(), LABELS.copy()
    changed[3, 0, 0, 0] ^= 1
    relabelled[0] = 3
    arrays = [(IMAGES, LABELS), (changed, LABELS), (IMAGES, relabelled), (IMAGES.reshape(12, 5, 6, 3), LABELS)]
    prints = [build(write(tmp_path / f"{n}.npz", image=i, label=y)).fingerprint for n, (i, y) in enumerate(arrays)]
    assert len({*prints}) == 4
    assert build(write(tmp_path / "again.npz", image=IMAGES, label=LABELS.astype(np.uint8))).fingerprint == prints[0]


def test_compressed_files_and_other_arrays_beside_do_not_matter(tmp_path: Path, file: Path) -> None:
    np.savez_compressed(tmp_path / "packed.npz", label=LABELS, image=IMAGES, score=np.zeros(3))
    assert build(tmp_path / "packed.npz").fingerprint == build(file).fingerprint


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"image": IMAGES}, r"expected the arrays image and label, got image; rename"),
        ({"x": IMAGES, "y": LABELS}, r"expected the arrays image and label, got x, y"),
        ({"image": IMAGES / 255, "label": LABELS}, r"image must be uint8 .*, got float64 \(12, 6, 5, 3\)"),
        ({"image": IMAGES.transpose(0, 3, 1, 2), "label": LABELS}, r"image must be .*, got uint8 \(12, 3, 6, 5\)"),
        ({"image": IMAGES[0, 0], "label": LABELS}, r"image must be .*, got uint8 \(5, 3\)"),
        ({"image": IMAGES[:0], "label": LABELS[:0]}, r"image must be .*, got uint8 \(0, 6, 5, 3\)"),
        ({"image": IMAGES, "label": LABELS[:9]}, r"label must be 12 integers, one an image, got int64 \(9,\)"),
        ({"image": IMAGES, "label": LABELS[:, None]}, r"label must be 12 integers, .* \(12, 1\)"),
        ({"image": IMAGES, "label": LABELS / 2}, r"label must be 12 integers, one an image, got float64"),
        ({"image": IMAGES, "label": LABELS - 1}, r"labels must be from 0, got -1 to 2"),
    ],
)
def test_other_arrays_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(BastionError, match=r"bad\.npz: " + message):
        build(write(tmp_path / "bad.npz", **arrays))


def test_labels_above_the_number_of_classes_are_refused(file: Path) -> None:
    with pytest.raises(BastionError, match="labels must be from 0 to 2, got 0 to 3; is `classes` right"):
        build(file, classes=3)
    with pytest.raises(BastionError, match=r"extra\.data: classes must be at least 1, got 0"):
        build(file, classes=0)


class _Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("trapped"),)


def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    objects = np.array([_Trap()] * 12, dtype=object)
    np.savez(tmp_path / "objects.npz", image=IMAGES, label=objects)
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps(_Trap()))
    for name in ("objects", "pickle"):
        with pytest.raises(BastionError, match=rf"{name}\.npz: not a \.npz file of plain arrays, or cut off"):
            build(tmp_path / f"{name}.npz")
    assert not (tmp_path / "trapped").exists()


def test_what_is_no_npz_file_is_refused(tmp_path: Path, file: Path) -> None:
    with pytest.raises(BastionError, match=r"none\.npz: no such file"):
        build(tmp_path / "none.npz")
    np.save(tmp_path / "one.npy", IMAGES)
    with pytest.raises(BastionError, match=r"one\.npy: holds one array without a name; expected a \.npz file"):
        build(tmp_path / "one.npy")
    whole = file.read_bytes()
    for name, content in {"empty": b"", "cut": whole[: len(whole) // 2], "text": b"hello"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            BastionError, match=rf"{name}: not a \.npz file of plain arrays, or cut off .*; get it again"
        ):
            build(tmp_path / name)
    with pytest.raises(BastionError, match="cannot be read: Is a directory"):
        build(tmp_path)


def test_a_damaged_array_is_noticed(tmp_path: Path, file: Path) -> None:
    """By the checksum that every zip file keeps of its members."""
    content = bytearray(file.read_bytes())
    with zipfile.ZipFile(io.BytesIO(bytes(content))) as zipped:
        place = zipped.getinfo("image.npy").header_offset + 400
    content[place] ^= 1
    file.write_bytes(content)
    with pytest.raises(BastionError, match="Bad CRC-32"):
        build(file)

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from data_samples import files_below, mean_and_std, python2_pickle, random_arrays, write_tar
from PIL import Image

from bastion.data import acquirers, datasets
from bastion.data.arrays import PARTS, digests
from bastion.data.cifar import CIFAR10, CIFAR100, read_cifar10, read_cifar100
from bastion.errors import BastionError
from bastion.storage import Arrays

ARRAYS = random_arrays(50, 10)


def batch(arrays: Arrays, split: str, rows: slice, labels: bytes) -> bytes:
    """A pickled batch: (N, 3072) with the three colour planes one after the other."""
    planes = arrays[f"{split}_images"][rows].transpose(0, 3, 1, 2).reshape(-1, 3072)
    names = [b"a.png"] * len(planes)
    numbers = arrays[f"{split}_labels"][rows].tolist()
    return python2_pickle({b"data": planes, labels: numbers, b"filenames": names, b"batch_label": b"batch"})


def official_members() -> dict[str, bytes]:
    train = {
        f"cifar-10-batches-py/data_batch_{i + 1}": batch(ARRAYS, "train", slice(10 * i, 10 * i + 10), b"labels")
        for i in reversed(range(5))  # the real archive has them in no order either
    }
    return {**train, "cifar-10-batches-py/test_batch": batch(ARRAYS, "test", slice(None), b"labels")}


def strip(images: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(images.reshape(-1, 1024, 3)).save(file, format="PNG")
    return file.getvalue()


def npm_members() -> dict[str, bytes]:
    images = ARRAYS["train_images"]
    return {
        **{f"package/data_batch_{i + 1}.png": strip(images[10 * i : 10 * i + 10]) for i in range(5)},
        "package/test_batch.png": strip(ARRAYS["test_images"]),
        "package/train_lables.json": json.dumps(ARRAYS["train_labels"].tolist()).encode(),
        "package/test_lables.json": json.dumps(ARRAYS["test_labels"].tolist()).encode(),
    }


@pytest.mark.parametrize("members", [official_members(), npm_members()], ids=["official", "npm"])
def test_both_archives_decode_to_the_same_arrays(tmp_path: Path, members: dict[str, bytes]) -> None:
    read = read_cifar10(write_tar(tmp_path / "archive", members))
    assert all((read[part] == ARRAYS[part]).all() for part in PARTS)
    assert digests(read) == digests(ARRAYS)


@pytest.mark.parametrize("members", [official_members(), npm_members()], ids=["official", "npm"])
def test_an_archive_of_other_pixels_is_refused_and_leaves_no_file(
    cache: Path, tmp_path: Path, members: dict[str, bytes]
) -> None:
    archive = write_tar(tmp_path / "archive", members)
    datasets.names()
    with pytest.raises(BastionError, match="archive: train_images is not as published"):
        acquirers["cifar10"](archive)
    assert files_below(cache) == []
    assert archive.exists()


def test_a_batch_with_a_command_in_it_is_refused_and_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "victim"),)

    members = {**official_members(), "cifar-10-batches-py/data_batch_3": pickle.dumps({"data": Evil()}, protocol=2)}
    with pytest.raises(BastionError, match=r"data_batch_3: not a pickle of plain arrays: it asks for posix\.mkdir"):
        read_cifar10(write_tar(tmp_path / "archive", members))
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize(
    ("member", "content", "message"),
    [
        ("cifar-10-batches-py/test_batch", python2_pickle([1, 2]), "test_batch: not a CIFAR batch"),
        ("cifar-10-batches-py/test_batch", python2_pickle({b"data": 3}), "test_batch: not a CIFAR batch"),
        (
            "cifar-10-batches-py/test_batch",
            python2_pickle({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, -1]}),
            "test_batch: expected a list of class numbers",
        ),
    ],
)
def test_a_batch_of_another_form_is_named(tmp_path: Path, member: str, content: bytes, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        read_cifar10(write_tar(tmp_path / "archive", {**official_members(), member: content}))


@pytest.mark.parametrize(
    ("member", "content", "message"),
    [
        ("package/data_batch_2.png", b"\x89PNG\r\n\x1a\n", r"data_batch_2\.png: not a readable picture"),
        ("package/data_batch_2.png", npm_members()["package/test_batch.png"][:-2000], r"data_batch_2\.png: not a rea"),
        ("package/test_lables.json", b"[1, 2", r"test_lables\.json: not readable as JSON"),
        ("package/test_lables.json", b'["cat"]', r"test_lables\.json: expected a list of class numbers"),
    ],
)
def test_a_broken_strip_is_named(tmp_path: Path, member: str, content: bytes, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        read_cifar10(write_tar(tmp_path / "archive", {**npm_members(), member: content}))


def test_an_archive_that_lacks_a_batch_is_told_which(tmp_path: Path) -> None:
    members = official_members()
    del members["cifar-10-batches-py/data_batch_4"]
    with pytest.raises(BastionError, match=r"it lacks cifar-10-batches-py/data_batch_4 and package/data_batch_1\.png"):
        read_cifar10(write_tar(tmp_path / "archive", members))


def cifar100_archive(path: Path) -> tuple[Path, Arrays]:
    arrays = random_arrays(300, 100, classes=100)
    members = {
        f"cifar-100-python/{split}": batch(arrays, split, slice(None), b"fine_labels") for split in ("train", "test")
    }
    return write_tar(path, {**members, "cifar-100-python/meta": python2_pickle({})}), arrays


def test_cifar100_has_the_fine_labels(tmp_path: Path) -> None:
    archive, arrays = cifar100_archive(tmp_path / "archive")
    assert digests(read_cifar100(archive)) == digests(arrays)
    assert len(set(CIFAR100.classes)) == 100


def test_cifar100_of_another_archive_is_refused(cache: Path, tmp_path: Path) -> None:
    archive, _ = cifar100_archive(tmp_path / "archive")
    datasets.names()
    with pytest.raises(BastionError, match=r"archive: MD5 .*, expected eb9058c3a382ffc7106e4002c42a8d85"):
        acquirers["cifar100"](archive)
    with pytest.raises(BastionError, match="none: no such file"):
        acquirers["cifar100"](tmp_path / "none")
    assert files_below(cache) == []


def test_cifar100_is_stored_and_read_without_pins(cache: Path, tmp_path: Path) -> None:
    archive, arrays = cifar100_archive(tmp_path / "archive")
    CIFAR100.store(read_cifar100(archive), "archive")
    data = datasets.build("cifar100")
    assert (len(data.train), len(data.val), len(data.test)) == (200, 100, 100)
    assert CIFAR100.verify() == digests(arrays)


def test_a_missing_cifar10_tells_how_to_get_it(cache: Path) -> None:
    with pytest.raises(BastionError, match=r"data set 'cifar10' is not in .*; get it with `bastion data get cifar10`"):
        datasets.build("cifar10")


@pytest.mark.skipif(not CIFAR10.path.exists(), reason="cifar10 is not in the cache; `bastion data get cifar10`")
def test_the_real_cifar10() -> None:
    data = datasets.build("cifar10")
    assert (len(data.train), len(data.val), len(data.test)) == (49_000, 1_000, 10_000)
    assert data.val.labels.bincount().tolist() == [100] * 10
    assert data.classes[data.test.labels[0]] == "cat"
    mean, std = mean_and_std(CIFAR10.read()["train_images"])
    assert mean == pytest.approx(data.mean, abs=1e-4)
    assert std == pytest.approx(data.std, abs=1e-4)


@pytest.mark.slow
def test_cifar10_is_got_from_the_network(cache: Path) -> None:
    datasets.names()
    acquirers["cifar10"](None)
    assert files_below(cache) == ["cifar10.safetensors"]
    assert CIFAR10.verify() == CIFAR10.pinned

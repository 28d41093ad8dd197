from __future__ import annotations

import gzip
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from data_samples import files_below, mean_and_std, random_arrays

from bastion.data import acquirers, datasets, fashion_mnist
from bastion.data.arrays import digests
from bastion.data.fashion_mnist import FASHION_MNIST, read_fashion_mnist
from bastion.errors import BastionError
from bastion.storage import Arrays

ARRAYS = random_arrays(40, 20, shape=(28, 28, 1))
NAMES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


def idx(array: np.ndarray) -> bytes:
    shape = array.shape[:3]
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + array.tobytes()


def write_folder(folder: Path, arrays: Arrays, *, gz: bool) -> Path:
    folder.mkdir(parents=True)
    for part, name in NAMES.items():
        content = idx(arrays[part])
        (folder / f"{name}{'.gz' * gz}").write_bytes(gzip.compress(content) if gz else content)
    return folder


@pytest.mark.parametrize("gz", [False, True])
def test_idx_files_are_read_plain_and_compressed(tmp_path: Path, gz: bool) -> None:
    read = read_fashion_mnist(write_folder(tmp_path / "files", ARRAYS, gz=gz))
    assert read["train_images"].shape == (40, 28, 28, 1)
    assert digests(read) == digests(ARRAYS)


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed")
def test_a_debian_package_is_read_without_installing_it(tmp_path: Path) -> None:
    write_folder(tmp_path / "tree/usr/share/datasets/fashion-mnist", ARRAYS, gz=True)
    (tmp_path / "tree/DEBIAN").mkdir()
    (tmp_path / "tree/DEBIAN/control").write_text(
        "Package: x\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.org>\nDescription: x\n"
    )
    package = tmp_path / "x.deb"
    subprocess.run(["dpkg-deb", "-b", tmp_path / "tree", package], check=True, capture_output=True)
    assert digests(read_fashion_mnist(package)) == digests(ARRAYS)
    package.write_bytes(b"no package" * 100)
    with pytest.raises(BastionError, match=r"`dpkg-deb -x .*`: dpkg-deb: error: .* is not a Debian format archive"):
        read_fashion_mnist(package)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], r"cut off: it has 39 bytes for an array of shape \(40,\)"),
        (lambda content: b"\x00\x00\x0d" + content[3:], "not an IDX file of bytes: it starts with '00 00 0d 01"),
        (lambda content: content[:6], "not an IDX file of bytes: it starts with '00 00 08 01 00 00'"),
        (lambda content: b"", "not an IDX file"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    folder = write_folder(tmp_path / "files", ARRAYS, gz=False)
    path = folder / NAMES["train_labels"]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BastionError, match=f"{path.name}: ({message})"):
        read_fashion_mnist(folder)


def test_a_cut_off_gz_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "files", ARRAYS, gz=True)
    path = folder / f"{NAMES['test_images']}.gz"
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(BastionError, match=r"t10k-images-idx3-ubyte\.gz: not readable, or cut off"):
        read_fashion_mnist(folder)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "files", ARRAYS, gz=True)
    (folder / f"{NAMES['test_labels']}.gz").unlink()
    with pytest.raises(BastionError, match=r"has neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte\.gz"):
        read_fashion_mnist(folder)
    with pytest.raises(BastionError, match="nowhere: expected a folder with train-images-idx3-ubyte"):
        read_fashion_mnist(tmp_path / "nowhere")


def test_other_pictures_are_refused_and_leave_no_file(cache: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "files", ARRAYS, gz=True)
    with pytest.raises(BastionError, match="files: train_images is not as published"):
        acquirers["fashion-mnist"](folder)
    assert files_below(cache) == []


def test_installed_files_come_first_and_stay(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "installed", ARRAYS, gz=True)
    small = fashion_mnist.ArrayData("fashion-mnist", FASHION_MNIST.classes, (0.5,), (0.5,), digests(ARRAYS))
    monkeypatch.setattr(fashion_mnist, "_DEBIAN_FOLDER", folder)
    monkeypatch.setattr(fashion_mnist, "FASHION_MNIST", small)
    acquirers["fashion-mnist"](None)
    assert files_below(cache) == ["fashion-mnist.safetensors"]
    assert len(files_below(folder)) == 4
    data = datasets.build("fashion-mnist")
    assert data.shape == (1, 28, 28)
    assert data.train.image(0).mode == "L"


@pytest.mark.skipif(not FASHION_MNIST.path.exists(), reason="fashion-mnist is not in the cache")
def test_the_real_fashion_mnist() -> None:
    data = datasets.build("fashion-mnist")
    assert (len(data.train), len(data.val), len(data.test)) == (59_000, 1_000, 10_000)
    assert data.classes[data.test.labels[0]] == "ankle boot"
    mean, std = mean_and_std(FASHION_MNIST.read()["train_images"])
    assert mean == pytest.approx(data.mean, abs=1e-4)
    assert std == pytest.approx(data.std, abs=1e-4)


@pytest.mark.slow
def test_fashion_mnist_is_got_from_the_network(cache: Path) -> None:
    acquirers["fashion-mnist"](None)
    assert files_below(cache) == ["fashion-mnist.safetensors"]
    assert FASHION_MNIST.verify() == FASHION_MNIST.pinned

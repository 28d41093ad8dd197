"""Images in one NumPy file, all for training, such as the synthetic ones of Rebuffi et al. and Gowal et al. (2021)."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bastion.data import datasets
from bastion.data.arrays import ArraySplit, Pixels
from bastion.errors import BastionError
from bastion.storage import Arrays, fingerprint, sha256
from bastion.types import DataSet

_PARTS = ("image", "label")
_SAMPLED = 30_000_000  # values that mean and std are taken from; all of a million images would take many seconds


@datasets.register("npz")
def npz(path: str, classes: int | None = None) -> DataSet:
    """A .npz file with arrays `image` and `label`: synthetic images, to go as `extra` with a data set.

    `image` is uint8, (N, H, W, C) or (N, H, W); `label` has N class numbers. There are `classes` of them, or as many
    as the highest says. Nothing is held out: validation and test are empty.
    """
    if classes is not None and classes < 1:
        raise ValueError(f"classes must be at least 1, got {classes}")
    where = Path(path).expanduser()
    arrays = _read(where)
    images, labels = _images(arrays["image"], where), _labels(arrays, classes, where)
    count = classes or int(labels.max()) + 1
    sample = images[:: -(-images.size // _SAMPLED)] / np.float32(255)
    height, width, channels = images.shape[1:]
    nothing = torch.empty(0, dtype=torch.long)
    return DataSet(
        name="npz",
        classes=tuple(str(label) for label in range(count)),
        shape=(channels, height, width),
        mean=tuple(sample.mean((0, 1, 2), dtype=np.float64).tolist()),
        std=tuple(sample.std((0, 1, 2), dtype=np.float64).tolist()),
        train=ArraySplit(images, labels),
        val=ArraySplit(images, labels, nothing),
        test=ArraySplit(images, labels, nothing),
        fingerprint=fingerprint([sha256(images), sha256(labels), images.shape, count]),
    )


def _read(path: Path) -> Arrays:
    """The two arrays. Nothing in the file is run: arrays of Python objects are refused."""
    try:
        with path.open("rb") as raw:  # NumPy leaves files open that are no archives
            file = np.load(raw, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise BastionError(f"{path}: holds one array without a name; expected a .npz file with image and label")
            if not {*_PARTS} <= {*file.files}:
                found = ", ".join(file.files) or "none"
                raise BastionError(f"{path}: expected the arrays image and label, got {found}; rename them")
            return {part: file[part] for part in _PARTS}
    except FileNotFoundError:
        raise BastionError(f"{path}: no such file") from None
    except (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise BastionError(f"{path}: not a .npz file of plain arrays, or cut off ({error}); get it again") from error


def _images(images: NDArray[Any], path: Path) -> Pixels:
    stack: Pixels = images[..., None] if images.ndim == 3 else images
    if stack.dtype != np.uint8 or stack.ndim != 4 or stack.shape[3] not in (1, 3) or 0 in stack.shape:
        raise BastionError(
            f"{path}: image must be uint8 of shape (N, H, W), (N, H, W, 1) or (N, H, W, 3), "
            f"got {images.dtype} {images.shape}"
        )
    return stack


def _labels(arrays: Arrays, classes: int | None, path: Path) -> NDArray[np.int64]:
    labels, count = arrays["label"], len(arrays["image"])
    if not np.issubdtype(labels.dtype, np.integer) or labels.shape != (count,):
        raise BastionError(f"{path}: label must be {count} integers, one an image, got {labels.dtype} {labels.shape}")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or (classes and high >= classes):
        most = f" to {classes - 1}" if classes else ""
        raise BastionError(f"{path}: labels must be from 0{most}, got {low} to {high}; is `classes` right?")
    return labels.astype(np.int64)

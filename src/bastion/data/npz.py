"""Training images in one NumPy file, such as the synthetic ones of Rebuffi et al. and Gowal et al. (2021)."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bastion import storage
from bastion.data import datasets
from bastion.data.arrays import ArraySplit, Pixels
from bastion.errors import BastionError
from bastion.memory import check_memory
from bastion.storage import Arrays, fingerprint, sha256
from bastion.types import DataSet

_PARTS = ("image", "label")
_NPY = b"\x93NUMPY"  # magic bytes of a file of one array
_SAMPLED = 30_000_000  # values for mean and std; all of a million images would take many seconds


@datasets.register("npz")
def npz(path: str, classes: int | None = None) -> DataSet:
    """A .npz file with arrays `image` and `label`: synthetic images, to go as `extra` with a data set.

    `image` is uint8, (N, H, W, C) or (N, H, W); `label` has N class numbers. There are `classes` of them, or as many
    as the highest says. Nothing is held out: validation and test are empty.
    """
    if classes is not None and classes < 1:
        raise ValueError(f"classes must be at least 1, got {classes}")
    where = Path(path).expanduser()
    arrays = read_npz(where, _PARTS)
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


def read_npz(path: Path, parts: Sequence[str]) -> Arrays:
    """Read these arrays of a .npz file. No code in it is run: arrays of Python objects are refused.

    The shape that an array claims is checked against the file's size and the free memory before it is allocated.
    """
    try:
        with storage.opened(path) as raw:
            if raw.read(len(_NPY)) == _NPY:
                raise BastionError(f"{path}: holds one array without a name; expected a .npz file with named ones")
        with storage.opened(path) as raw, zipfile.ZipFile(raw) as archive:
            found = [name.removesuffix(".npy") for name in archive.namelist()]
            if not {*parts} <= {*found}:
                got = ", ".join(found[:10]) or "none"
                raise BastionError(f"{path}: expected the arrays {' and '.join(parts)}, got {got}; rename them")
            needed = sum(_size(archive, part, path) for part in parts)
            check_memory(needed, torch.device("cpu"), str(path), "use fewer images")
            return {part: _array(archive, part) for part in parts}
    except BastionError:
        raise
    except Exception as error:  # damaged files can make zipfile and numpy raise anything
        reason = str(error) or type(error).__name__
        raise BastionError(f"{path}: not a .npz file of plain arrays, or cut off ({reason}); get it again") from error


def _size(archive: zipfile.ZipFile, part: str, path: Path) -> int:
    """Return the bytes of an array according to its header."""
    info = archive.getinfo(f"{part}.npy")
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(member)
        size = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or min(shape, default=0) < 0:
            raise ValueError(f"{part} holds Python objects" if dtype.hasobject else f"{part} has shape {shape}")
        if size > info.file_size - member.tell():
            raise BastionError(
                f"{path}: {part} claims the shape {shape}, for which the file is too short; get it again"
            )
        return size


def _array(archive: zipfile.ZipFile, part: str) -> NDArray[Any]:
    with archive.open(f"{part}.npy") as member:
        array: NDArray[Any] = np.lib.format.read_array(member, allow_pickle=False)
        return array


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

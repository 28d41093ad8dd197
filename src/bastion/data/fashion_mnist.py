"""Fashion-MNIST (Xiao et al. 2017): 28 x 28 grey pictures of clothes, in MNIST's IDX files."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from bastion.data import acquirers, datasets
from bastion.data.acquire import Source, acquire, from_apt, run
from bastion.data.arrays import ArrayData, verifiers
from bastion.data.download import part_of
from bastion.data.idx import FILES, from_site, read_idx_folder
from bastion.errors import BastionError
from bastion.storage import Arrays, is_folder
from bastion.types import DataSet

_SITE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_DEBIAN_PACKAGE = "dataset-fashion-mnist"
_DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")

_MD5 = {  # published, of the .gz files
    "train_images": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train_labels": "25c81989df183df01b3e8a0aad5dffbe",
    "test_images": "bef4ecab320f06d8554ea6380940ec79",
    "test_labels": "bb300cfdad3c16e7a12a480ee83cd310",
}

FASHION_MNIST = ArrayData(
    name="fashion-mnist",
    classes=(
        *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
    mean=(0.2860,),
    std=(0.3530,),
    # Of what the published .gz files decode to.
    pinned={
        "train_images": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        "train_labels": "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
        "test_images": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        "test_labels": "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
    },
)


def read_fashion_mnist(path: Path) -> Arrays:
    """Read the arrays of a folder with the four IDX files, or of the Debian package's .deb file."""
    if path.suffix == ".deb":
        with tempfile.TemporaryDirectory() as scratch:
            run(["dpkg-deb", "-x", str(path.absolute()), scratch], Path(scratch))
            return read_fashion_mnist(Path(scratch) / _DEBIAN_FOLDER.relative_to("/"))
    if not is_folder(path):
        raise BastionError(f"{path}: expected a folder with {FILES['train_images']}[.gz] …, or a .deb file")
    return read_idx_folder(path)


def _copy_installed(folder: Path) -> None:
    if not _DEBIAN_FOLDER.is_dir():
        raise BastionError(f"the Debian package {_DEBIAN_PACKAGE} is not installed")
    shutil.copytree(_DEBIAN_FOLDER, part_of(folder), dirs_exist_ok=True)
    os.replace(part_of(folder), folder)


def _get(source: Path | None) -> Path:
    sources = (
        Source("installed files", "fashion-mnist-installed", _copy_installed),
        Source("the Debian package", f"{_DEBIAN_PACKAGE}.deb", from_apt(_DEBIAN_PACKAGE)),
        Source("the official files", "fashion-mnist", from_site(_SITE, _MD5)),
    )
    return acquire(FASHION_MNIST, sources, read_fashion_mnist, source)


@datasets.register("fashion-mnist")
def fashion_mnist() -> DataSet:
    """70,000 grey pictures of clothes of 28 x 28 in 10 classes."""
    return FASHION_MNIST.data_set(FASHION_MNIST.read())


acquirers["fashion-mnist"] = _get
verifiers["fashion-mnist"] = FASHION_MNIST.verify

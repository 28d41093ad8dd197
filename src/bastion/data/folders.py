"""Named data sets that are folders of class folders, in `root` or in `$BASTION_DATA/NAME`."""

from __future__ import annotations

from dataclasses import replace

from bastion import rng
from bastion.data import cache_folder, datasets
from bastion.data.classes import select_classes
from bastion.data.imagefolder import imagefolder
from bastion.data.known import SIZES
from bastion.errors import BastionError
from bastion.types import DataSet


@datasets.register("imagenet")
def imagenet(
    root: str | None = None,
    size: int = 224,
    crop_pct: float = 0.875,
    test_folder: str | None = None,
    class_map: str | None = None,
    subset: str | None = None,
) -> DataSet:
    """ImageNet-1k (Russakovsky et al. 2015): 1,281,167 photos to train on and 50,000 others in 1,000 classes.

    `subset: robustbench` measures on the 5,000 of these that RobustBench does, a path on those that the file lists.
    """
    return _folder("imagenet", root, size, crop_pct, test_folder, class_map=class_map, subset=subset)


@datasets.register("imagenet-100")
def imagenet_100(
    root: str | None = None,
    classes: tuple[str, ...] = (),
    size: int = 224,
    crop_pct: float = 0.875,
    test_folder: str | None = None,
    class_map: str | None = None,
) -> DataSet:
    """100 classes of ImageNet: those named, or a random choice.

    `root` holds them, or all of ImageNet; without it `$BASTION_DATA/imagenet-100` or `$BASTION_DATA/imagenet` does.
    The choice is bastion's own and fixed. Papers differ in theirs: to use a paper's, give its `classes`.
    With `class_map: imagenet` models of ImageNet's 1,000 classes are measured on these.
    """
    if classes and len(classes) != 100:
        raise ValueError(f"classes: expected 100 of ImageNet's folder names, got {len(classes)}")
    data = _folder(
        "imagenet-100",
        root,
        size,
        crop_pct,
        test_folder,
        class_map=class_map,
        expected=range(100, 1001),
        elsewhere=("imagenet",),
    )
    drawn = rng.permutation(0, "imagenet-100", len(data.classes))[:100].sort().values.tolist()
    return select_classes(data, classes or [data.classes[number] for number in drawn])


@datasets.register("imagenette")
def imagenette(
    root: str | None = None,
    size: int = 224,
    crop_pct: float = 0.875,
    test_folder: str | None = None,
    class_map: str | None = None,
) -> DataSet:
    """Imagenette (Howard 2019): ten classes of ImageNet that are easy to tell apart.

    With `class_map: imagenet` models of ImageNet's 1,000 classes are measured on these ten.
    """
    return _folder("imagenette", root, size, crop_pct, test_folder, class_map=class_map)


@datasets.register("flowers102")
def flowers102(
    root: str | None = None, size: int = 224, crop_pct: float = 0.875, test_folder: str | None = "test"
) -> DataSet:
    """Flowers-102 (Nilsback and Zisserman 2008): 20 photos of each of 102 flowers to train on, 6,149 others.

    These 20 are its training and its validation images: bastion holds out some of its own.
    """
    return _folder("flowers102", root, size, crop_pct, test_folder)


@datasets.register("caltech101")
def caltech101(
    root: str | None = None, size: int = 224, crop_pct: float = 0.875, test_folder: str | None = None
) -> DataSet:
    """Caltech-101 (Fei-Fei et al. 2004), with or without the folder of the background.

    It has no official split. Usually 30 photos of each class are trained on; of plain class folders 80 % are.
    """
    return _folder("caltech101", root, size, crop_pct, test_folder, expected=range(101, 103))


def _folder(
    name: str,
    root: str | None,
    size: int,
    crop_pct: float,
    test_folder: str | None,
    *,
    class_map: str | None = None,
    subset: str | None = None,
    expected: range | None = None,
    elsewhere: tuple[str, ...] = (),
) -> DataSet:
    """Return the folder as a data set of this name; raise if its number of classes is unexpected."""
    home = root or _home(name, elsewhere, test_folder or "val")
    data = imagefolder(home, size, crop_pct, test_folder, class_map=class_map, subset=subset)
    right = expected or range(SIZES[name].classes, SIZES[name].classes + 1)
    if len(data.classes) not in right:
        raise BastionError(
            f"data set '{name}': has {SIZES[name].classes} classes, this folder has {len(data.classes)}; give the "
            "right one as data.root, or use `imagefolder` for any other"
        )
    return replace(data, name=name)


def _home(name: str, elsewhere: tuple[str, ...], test_folder: str) -> str:
    """Return the folder in the cache with this name, or one of the others."""
    places = [cache_folder() / place for place in (name, *elsewhere)]
    for place in places:
        if place.is_dir():
            return str(place)
    raise BastionError(
        f"data set '{name}' is not in {cache_folder()}; put it there as {places[0]}/train/CLASS/*.jpg and "
        f"{places[0]}/{test_folder}/CLASS/*.jpg, or say with data.root which folder has it"
    )

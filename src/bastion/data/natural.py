"""Natural distribution shifts of ImageNet: test-only folders of other pictures of its classes.

Each is in `root`, or in `$BASTION_DATA/NAME`. All pictures are in the test split; a model of ImageNet's 1,000 classes
is measured on the classes of the folders (`class_map.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from bastion.data import cache_folder, datasets
from bastion.data.imagefolder import OnError, imagefolder
from bastion.errors import BastionError
from bastion.types import DataSet


@datasets.register("imagenet-a")
def imagenet_a(
    root: str | None = None, size: int = 224, crop_pct: float = 0.875, on_error: OnError = "stop"
) -> DataSet:
    """ImageNet-A (Hendrycks et al. 2021): 7,500 photos of 200 classes that a ResNet-50 gets wrong; measured only."""
    return _measured("imagenet-a", root, size, crop_pct, classes=200, on_error=on_error)


@datasets.register("imagenet-r")
def imagenet_r(
    root: str | None = None, size: int = 224, crop_pct: float = 0.875, on_error: OnError = "stop"
) -> DataSet:
    """ImageNet-R (Hendrycks et al. 2021): 30,000 renditions, as art, toys, graffiti, of 200 classes; measured only."""
    return _measured("imagenet-r", root, size, crop_pct, classes=200, on_error=on_error)


@datasets.register("imagenet-sketch")
def imagenet_sketch(
    root: str | None = None, size: int = 224, crop_pct: float = 0.875, on_error: OnError = "stop"
) -> DataSet:
    """ImageNet-Sketch (Wang et al. 2019): 50,889 black and white drawings of all 1,000 classes; measured only."""
    return _measured("imagenet-sketch", root, size, crop_pct, classes=1000, on_error=on_error)


@datasets.register("imagenet-v2")
def imagenet_v2(
    root: str | None = None, size: int = 224, crop_pct: float = 0.875, on_error: OnError = "stop"
) -> DataSet:
    """ImageNet-V2 (Recht et al. 2019): 10,000 new photos of all 1,000 classes, folders 0 to 999; measured only."""
    return _measured("imagenet-v2", root, size, crop_pct, classes=1000, on_error=on_error)


@datasets.register("imagenet-val")
def imagenet_val(
    root: str | None = None,
    size: int = 224,
    crop_pct: float = 0.875,
    subset: str | None = None,
    interpolation: Literal["bicubic", "bilinear"] = "bicubic",
    on_error: OnError = "stop",
) -> DataSet:
    """ImageNet's validation photos without the training ones, of any of its classes; measured only.

    `subset: robustbench` takes the 5,000 that RobustBench measures on, a path those that the file lists.
    `interpolation: bilinear` resizes pictures as RobustBench does.
    """
    return _measured(
        "imagenet-val", root, size, crop_pct, subset=subset, interpolation=interpolation, on_error=on_error
    )


def _measured(
    name: str, root: str | None, size: int, crop_pct: float, *, classes: int | None = None, **options: Any
) -> DataSet:
    home = cache_folder() / name
    if root is None and not home.is_dir():
        raise BastionError(
            f"data set '{name}' is not in {cache_folder()}; put it there as {home}/CLASS/*.jpg, or say with data.root "
            "which folder has it"
        )
    folder = Path(root) if root is not None else home
    data = imagefolder(str(folder), size, crop_pct, test_only=True, class_map="imagenet", **options)
    if classes not in (None, len(data.classes)):
        raise BastionError(
            f"data set '{name}': has {classes} classes, {folder} has {len(data.classes)}; give the right folder as "
            "data.root, or use `imagefolder` with test_only and class_map for any other"
        )
    return replace(data, name=name)

"""Converts a user's data to a data set: tensors, arrays, lists, a torch Dataset or DataLoader, a folder, a name.

as_data((x, y))                                  # images (N, C, H, W) or (N, H, W, C), in [0, 1] or bytes; labels
as_data(torchvision.datasets.SVHN("data"))       # a torch Dataset of (image, label)
as_data("imagefolder:root=/data/cats,size=160")  # a name, with settings
as_data("/data/cats")                            # a folder of class folders
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from bastion.data.arrays import ArraySplit, TensorSplit
from bastion.data.class_map import class_columns
from bastion.data.picture import check_depth
from bastion.errors import BastionError, did_you_mean, shown
from bastion.memory import check_memory
from bastion.progress import bar
from bastion.recipe import named_data
from bastion.types import DataSet, Split

ClassMap = Sequence[int] | Mapping[str, int] | str | Path
COPIES = 3  # of all images in float32, while a Dataset is read
NORMALISED = 0.05  # outside [0, 1] by more than this: normalised, not rounded


def as_data(
    given: Any,
    *,
    num_classes: Callable[[Tensor], int | None] = lambda _: None,
    limit: int | None = None,
    class_map: ClassMap | None = None,
) -> DataSet | dict[str, Any]:
    """Return a data set, or the spec of one. Of a Dataset or DataLoader the first `limit` examples are read.

    `num_classes` returns the model's number of classes for an image; None: as many as the labels have. `class_map` says
    which outputs of a model of more classes the labels are: a list, outputs by the names of classes, or as of
    `imagefolder` the name of a map or a file.
    """
    if isinstance(given, DataSet):
        return given if class_map is None else replace(given, columns=_columns(class_map, given.classes))
    if isinstance(given, Mapping) and "name" not in given:
        keys = ", ".join(map(str, given))
        raise BastionError(f"data: expected (x, y), or a data set as {{name: …}}, got a dict of {keys}")
    if isinstance(given, Mapping | str | Path):
        spec = dict(given) if isinstance(given, Mapping) else named_data(str(given))
        return spec if class_map is None else spec | {"class_map": class_map}
    if isinstance(given, DataLoader):
        pairs = _rows(given, limit)
    elif isinstance(given, Dataset):
        pairs = _items(given, limit)
    elif _is_list_of_pairs(given):
        pairs = _collected(given[:limit], len(given[:limit]))
    elif isinstance(given, tuple | list) and len(given) == 2:
        pairs = images(given[0])[:limit], labels(given[1])[:limit]
        _check_lengths(len(given[0]), len(given[1]))
    else:
        raise BastionError(
            "data: expected (x, y), a torch Dataset or DataLoader, a folder, or the name of a data set (see `bastion "
            f"list data`), got {type(given).__name__}"
        )
    names = tuple(map(str, getattr(getattr(given, "dataset", given), "classes", ())))
    x, y = pairs
    if class_map is not None:
        columns = _columns(class_map, names)
        return from_tensors(x, y, num_classes=len(columns), classes=names, columns=columns)
    outputs = num_classes(x[:1])
    if names and outputs and len(names) != outputs:
        raise BastionError(
            f"data: the data set has {len(names)} classes, the model {outputs} outputs; for measuring, class_map= says "
            "which of the outputs they are: a list, a dict by the names of classes, or 'imagenet'"
        )
    return from_tensors(x, y, num_classes=outputs, classes=names)


def _is_list_of_pairs(given: Any) -> bool:
    """Whether it is [(image, label), …], and not [images, labels]."""
    if not isinstance(given, list) or not given or not all(isinstance(each, tuple) for each in given):
        return False
    return len(given[0]) == 2 and np.size(given[0][1]) == 1 and np.size(given[0][0]) > 1


def _columns(class_map: ClassMap, classes: Sequence[str]) -> tuple[int, ...]:
    """Return the output of each class; without names of classes, those of a list."""
    if isinstance(class_map, Mapping | str | Path) and not classes:
        raise BastionError("class_map: these data have no names of classes; give a list with the output of each label")
    if isinstance(class_map, str | Path):
        return class_columns(str(class_map), classes, Path("data"))
    if isinstance(class_map, Mapping):
        known = {str(name): output for name, output in class_map.items()}
        if unknown := [name for name in classes if name not in known]:
            raise BastionError(f"class_map: no output of the class '{unknown[0]}'{did_you_mean(unknown[0], known)}")
        class_map = [known[name] for name in classes]
    if classes and len(class_map) != len(classes):
        raise BastionError(f"class_map: {len(class_map)} outputs, but {len(classes)} classes; give one of each")
    return tuple(labels(list(class_map)).tolist())


def from_tensors(
    x: Tensor,
    y: Tensor,
    *,
    num_classes: int | None = None,
    classes: Sequence[str] = (),
    columns: tuple[int, ...] | None = None,
) -> DataSet:
    """Return a data set whose test split has these images (N, C, H, W) in [0, 1] and labels."""
    if not len(x):
        raise BastionError("data: there are no images")
    count = num_classes or int(y.max()) + 1
    if int(y.min()) < 0 or int(y.max()) >= count:
        raise BastionError(
            f"data: labels must be from 0 to {count - 1}, the model's classes; got {int(y.min())} to {int(y.max())}"
        )
    split: Split = _as_bytes(x, y) or TensorSplit(x, y)
    means, stds = x.mean((0, 2, 3), dtype=torch.float64), x.std((0, 2, 3)).double().clamp(min=1e-3)
    nothing = split.subset([])
    return DataSet(
        name="tensors",
        classes=tuple(classes) if len(classes) == count else tuple(map(str, range(count))),
        shape=(x.shape[1], x.shape[2], x.shape[3]),
        mean=tuple(means.tolist()),
        std=tuple(stds.tolist()),
        train=nothing,
        val=nothing,
        test=split,
        fingerprint=hashlib.sha256(split.digest().encode()).hexdigest()[:16],
        columns=columns,
    )


def images(given: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert tensors, arrays or lists to floats (N, C, H, W) in [0, 1]; bytes are divided by 255."""
    x = torch.stack([image(each) for each in given]) if isinstance(given, list | tuple) else _tensor(given, "images")
    if x.ndim == 3:
        raise BastionError(
            f"images: expected (N, C, H, W), got {tuple(x.shape)}; for one image, add a batch axis: x[None]; for grey "
            "images, a channel axis: x[:, None]"
        )
    if x.ndim != 4:
        raise BastionError(f"images: expected (N, C, H, W), got {tuple(x.shape)}")
    if x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        x = x.permute(0, 3, 1, 2)
    return in_range(x, dtype)


def image(given: Any) -> Tensor:
    """Convert one image, also of PIL, to (C, H, W)."""
    if isinstance(given, Image.Image):
        try:
            check_depth(given)
        except ValueError as error:
            raise BastionError(f"data: an image cannot be used: {error}") from error
        given = np.array(given.convert("L" if given.mode in ("1", "L") else "RGB"))
    x = _tensor(given, "an image")
    x = x[None] if x.ndim == 2 else x
    if x.ndim != 3:
        raise BastionError(f"data: expected an image as (C, H, W), got {tuple(x.shape)}")
    return x.permute(2, 0, 1) if x.shape[0] not in (1, 3) and x.shape[2] in (1, 3) else x


def in_range(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert to floats in [0, 1]; raise if the images seem to be normalised or not divided by 255."""
    if x.dtype == torch.uint8:
        return x.to(dtype).div_(255).contiguous()
    if not x.is_floating_point():
        raise BastionError(f"images: expected floats in [0, 1] or bytes, got {x.dtype}; divide by 255 first")
    x = x.to(dtype).contiguous()
    low, high = (x.min().item(), x.max().item()) if x.numel() else (0.0, 0.0)
    if low >= 0 and high <= 1:
        return x
    if low < -NORMALISED:
        raise BastionError(
            f"images: pixels are from {low:.3g} to {high:.3g}, so they seem to be normalised already. Attacks need "
            "pixels in [0, 1]: undo the normalisation, and put it into the model: bastion.wrap(model, mean=…, std=…)"
        )
    if high > 1.5:
        raise BastionError(f"images: pixels are from {low:.3g} to {high:.3g}; divide them by 255")
    if high > 1 + NORMALISED or not (x.isfinite().all()):
        raise BastionError(f"images: pixels must be in [0, 1], got {low:.3g} to {high:.3g}")
    return x.clamp(0, 1)  # such as rounding of a resize


def labels(given: Any) -> Tensor:
    """Convert tensors, arrays or lists to int64 (N,)."""
    y = _tensor(given, "labels")
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1:
        near = "; if one-hot, argmax(1)" if y.ndim == 2 else "; for one image, a list: [3]" if y.ndim == 0 else ""
        raise BastionError(f"labels: expected class numbers of shape (N,), got {tuple(y.shape)}{near}")
    if y.is_floating_point() and not torch.equal(y, y.round()):
        raise BastionError("labels: expected class numbers, got fractions")
    return y.long()


def _tensor(given: Any, what: str) -> Tensor:
    try:
        if isinstance(given, Tensor):
            return given.detach().cpu()
        array = np.asarray(given)
        if array.dtype.kind in "OUS":  # objects or text, about which torch's words are long
            first = given[0] if isinstance(given, list | tuple) and len(given) else given
            raise TypeError(f"such as {shown(first)}")
        return torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BastionError(f"{what}: cannot be read as numbers, got {type(given).__name__} ({error})") from error


def _items(given: Dataset[Any], limit: int | None) -> tuple[Tensor, Tensor]:
    """Read a torch Dataset of pairs of image and label."""
    if isinstance(given, IterableDataset):
        return _collected(itertools.islice(given, limit), limit)
    count = len(given) if limit is None else min(limit, len(given))  # type: ignore[arg-type]
    return _collected((given[number] for number in range(count)), count)


def _rows(given: DataLoader[Any], limit: int | None) -> tuple[Tensor, Tensor]:
    """Read a DataLoader of batches of images and labels."""
    pairs = ((image, label) for batch in given for image, label in zip(*_pair(batch), strict=False))
    own = len(given.dataset) if hasattr(given.dataset, "__len__") else limit
    return _collected(itertools.islice(pairs, limit), own if limit is None or own is None else min(limit, own))


def _collected(pairs: Iterable[Any], total: int | None) -> tuple[Tensor, Tensor]:
    x: list[Tensor] = []
    y: list[Tensor] = []
    with bar("reading data", total or 0, 0) as advance:
        for pair in pairs:
            picture, label = _pair(pair)
            x.append(image(picture))
            y.append(_label(label, len(y)))
            if x[-1].shape != x[0].shape:
                raise BastionError(
                    f"data: images must have one size, got {tuple(x[0].shape)} and {tuple(x[-1].shape)}; resize them "
                    "in the data set's transform"
                )
            if len(x) == 1 and total:
                needed = COPIES * 4 * x[0].numel() * total
                remedy = "limit= takes the first ones only, and `imagefolder` reads pictures as they are needed"
                check_memory(needed, torch.device("cpu"), f"data: {total} images of {tuple(x[0].shape)}", remedy)
            advance()
    if not x:
        raise BastionError("data: there are no images")
    return in_range(torch.stack(x)), torch.cat(y)


def _label(given: Any, number: int) -> Tensor:
    """Convert the label of one example to int64 (1,)."""
    try:
        y = _tensor(given, "label")
        if y.numel() != 1:
            raise BastionError(f"label: expected one class number, got {tuple(y.shape)}; if one-hot, argmax()")
        return labels(y.flatten())
    except BastionError as error:
        raise BastionError(f"data: example {number}: {error}") from error


def _pair(given: Any) -> tuple[Any, Any]:
    if not isinstance(given, tuple | list) or len(given) < 2:
        raise BastionError(f"data: expected pairs of image and label, got {type(given).__name__}")
    return given[0], given[1]


def _as_bytes(x: Tensor, y: Tensor) -> ArraySplit | None:
    """Store as bytes, in a quarter of the memory, if that is exact; else None."""
    levels = (255 * x).round()
    if not torch.equal(levels / 255, x):
        return None
    return ArraySplit(levels.byte().permute(0, 2, 3, 1).contiguous().numpy(), y.numpy())


def _check_lengths(images: int, labels: int) -> None:
    if images != labels:
        raise BastionError(f"data: {images} images, but {labels} labels")

"""Any folder of class folders: ImageNet, Imagenette, Flowers, Caltech. Pictures are decoded on access."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.data.transforms_factory import create_transform
from torch import Tensor

from bastion.data import datasets
from bastion.data.class_map import class_columns
from bastion.data.contents import contents_digest
from bastion.data.picture import read_picture
from bastion.data.split import train_val_split
from bastion.data.subset import read_subset, subset_rows
from bastion.errors import BastionError, printable
from bastion.progress import bar, console
from bastion.settings import AtLeastOne, Share
from bastion.storage import fingerprint, is_folder, reading
from bastion.types import Batch, DataSet, Split

Transform = Callable[[Image.Image], Tensor]  # to uint8 (3, size, size)

_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff", ".gif"}
_TEST_FOLDERS = ("val", "validation", "test")
_TEST_PERCENT = 20  # of each class, where the folder has no test part of its own


@dataclass(frozen=True)
class Listing:
    """The pictures of one folder of class folders, in the order of the SHA-256 of their relative paths.

    In alphabetical order the first N pictures would all be of the first class. In the order of a hash they are a random
    sample of all classes, the same on every machine.
    """

    folder: Path
    classes: tuple[str, ...]
    files: tuple[tuple[str, int], ...]  # relative path, size in bytes
    labels: Tensor


class FolderSplit(Split):
    """Some pictures of a listing. An example's index is its position in the listing."""

    def __init__(self, listing: Listing, transform: Transform, rows: Tensor | None = None) -> None:
        self._listing = listing
        self._transform = transform
        self.index = torch.arange(len(listing.files)) if rows is None else rows
        self.labels = listing.labels[self.index]

    def image(self, position: int) -> Image.Image:
        return read_picture(self._listing.folder / self._listing.files[int(self.index[position])][0])

    def batch(self, positions: Sequence[int]) -> Batch:
        where = torch.as_tensor(positions, dtype=torch.long)
        pixels = torch.stack([self._transform(self.image(position)) for position in where.tolist()])
        return Batch(self.index[where], pixels.float() / 255, self.labels[where])

    def digest(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        rows = self.index.tolist()
        return contents_digest(self._listing.folder, [self._listing.files[row][0] for row in rows])

    def subset(self, positions: Sequence[int]) -> FolderSplit:
        where = torch.as_tensor(positions, dtype=torch.long)
        return FolderSplit(self._listing, self._transform, self.index[where])


@dataclass(frozen=True)
class _Parts:
    """Listings of pictures, and their rows for each split."""

    train: Listing
    train_rows: Tensor
    val_rows: Tensor
    test: Listing
    test_rows: Tensor


OnError = Literal["stop", "skip"]


@datasets.register("imagefolder")
def imagefolder(
    root: str,  # the folder
    size: AtLeastOne = 224,  # pixels of the images' side
    crop_pct: Share = 0.875,  # share of the shorter side that the centre crop keeps
    test_folder: str | None = None,  # which one has the test images
    training_only: bool = False,  # hold no image back
    copies_of: str | None = None,  # root of the images that these are changed copies of
    test_only: bool = False,  # all images are for testing
    class_map: str | None = None,  # which outputs of a model of more classes they are
    subset: str | None = None,  # file that lists the images that are measured
    on_error: OnError = "stop",  # skip: decode all pictures first, leave out and tell what fails
    interpolation: Literal["bicubic", "bilinear"] = "bicubic",  # how pictures are resized
) -> DataSet:
    """Any folder of class folders: ImageNet, Imagenette, Flowers, Caltech.

    `root` has a folder `train` and one of `val`, `validation` and `test`, or else just the class folders.
    In the second case 20 % of each class are for testing. `test_folder` says which of several it is.
    For measuring, the shorter side becomes `size / crop_pct` pixels and the centre is cut out.

    For pictures that go as `extra` with others: `training_only` holds none of them back. `copies_of` names the root
    of the pictures that these are changed copies of, by the same relative paths but for the suffix (DeepAugment);
    those whose originals are held out of training are left out. Folders with exactly the same relative paths are
    split the same way without it, but one missing copy is enough to change the split.

    For pictures that a model is only measured on: `test_only` takes all of them, those of `root` or of its test folder,
    for testing. `class_map` says which outputs of a model of more classes they are (see `class_map.py`), `subset`
    which of them are measured, in what order (see `subset.py`).
    """
    if test_folder is not None and (training_only or copies_of):
        raise ValueError("test_folder has no use here: with training_only or copies_of nothing is tested on")
    if (test_only or subset) and (training_only or copies_of):
        raise ValueError("test_only and subset say what is tested on: they do not go with training_only or copies_of")
    folder = Path(root).expanduser()
    if training_only or copies_of:
        parts = _training_only(folder, copies_of)
    else:
        parts = _test_only(folder, test_folder) if test_only else _split(folder, test_folder)
    transform = create_transform(
        (3, size, size), is_training=False, interpolation=interpolation, crop_pct=crop_pct, normalize=False
    )
    skipped: list[str] = []
    if on_error == "skip":
        parts, skipped = _readable(parts, transform)
    columns = _columns(class_map, parts) if class_map else None
    # Paths and sizes only: `Split.digest` hashes the contents.
    content: list[Any] = [parts.train.files, parts.test.files, size, crop_pct]
    if not len(parts.test_rows):
        content.append(parts.train_rows.tolist())  # may depend on the originals
    content += [{"skipped": skipped}] if skipped else []
    content += [{"interpolation": interpolation}] if interpolation != "bicubic" else []
    content += [{"test_only": True}] * test_only + [{"columns": columns}] * (columns is not None)
    if subset:
        paths, digest = read_subset(subset)
        files = parts.test.files
        rows = {files[row][0]: row for row in parts.test_rows.tolist()}
        parts = replace(parts, test_rows=subset_rows(paths, rows, parts.test.folder))
        content.append({"subset": digest})
    return DataSet(
        name="imagefolder",
        classes=parts.train.classes,
        shape=(3, size, size),
        mean=IMAGENET_DEFAULT_MEAN,
        std=IMAGENET_DEFAULT_STD,
        train=FolderSplit(parts.train, transform, parts.train_rows),
        val=FolderSplit(parts.train, transform, parts.val_rows),
        test=FolderSplit(parts.test, transform, parts.test_rows),
        fingerprint=fingerprint(content),
        columns=columns,
        skipped=tuple(skipped),
        preprocessing=preprocessing(size, crop_pct, interpolation),
    )


def preprocessing(size: int, crop_pct: float, interpolation: str) -> str:
    return f"{size} pixels, crop {crop_pct:g}, {interpolation}"


def _split(root: Path, test_folder: str | None) -> _Parts:
    """Split the pictures into training, validation and test."""
    train, used, rest = _training_folder(root)
    if train.folder == root:
        if test_folder is not None:
            raise BastionError(f"{root}: `test_folder` is given, but there is no folder `train` beside it")
        test, test_rows = train, rest
    else:
        test = list_pictures(root / _test_name(root, test_folder))
        test_rows = torch.arange(len(test.files))
        _check_classes(root, train, test)
    train_rows, val_rows = train_val_split(train.labels[used])
    return _Parts(train, used[train_rows], used[val_rows], test, test_rows)


def _training_only(root: Path, originals: str | None) -> _Parts:
    """Use all pictures for training, except copies of originals that are held out."""
    listing = list_pictures(_training_root(root))
    rows, nothing = torch.arange(len(listing.files)), torch.empty(0, dtype=torch.long)
    if originals is not None:
        original, used, _ = _training_folder(Path(originals).expanduser())
        training = set(used[train_val_split(original.labels[used])[0]].tolist())
        known: dict[str, bool] = {}
        for row, (path, _) in enumerate(original.files):
            known[_stem(path)] = row in training and known.get(_stem(path), True)
        unknown = [path for path, _ in listing.files if _stem(path) not in known]
        if unknown:
            raise BastionError(
                f"{listing.folder}: {len(unknown)} pictures, such as {unknown[0]}, have no original in "
                f"{original.folder}; remove them, or correct `copies_of`"
            )
        rows = rows[torch.tensor([known[_stem(path)] for path, _ in listing.files])]
    return _Parts(listing, rows, nothing, listing, nothing)


def _test_only(root: Path, test_folder: str | None) -> _Parts:
    """Use all pictures of the class folders, or of the test folder if there is one, for testing."""
    if not is_folder(root):
        raise BastionError(f"{root}: no such folder; it must be a folder of class folders")
    has_parts = test_folder or any(
        is_folder(root / name) and _folders(root / name) for name in ("train", *_TEST_FOLDERS)
    )
    listing = list_pictures(root / _test_name(root, test_folder) if has_parts else root)
    nothing = torch.empty(0, dtype=torch.long)
    return _Parts(listing, nothing, nothing, listing, torch.arange(len(listing.files)))


def _readable(parts: _Parts, transform: Transform) -> tuple[_Parts, list[str]]:
    """Leave out pictures that cannot be decoded; also return their paths."""
    used = {"train_rows": parts.train, "val_rows": parts.train, "test_rows": parts.test}
    rows = {name: getattr(parts, name) for name in used}
    failed: list[str] = []
    worker = multiprocessing.parent_process() is not None  # what it skips was told by the main process
    with bar("decoding pictures", sum(map(len, rows.values())), silent=worker) as advance:
        for name, listing in used.items():
            split, kept = FolderSplit(listing, transform, rows[name]), list[int]()
            for position in range(len(split)):
                advance()
                try:
                    split.image(position)
                    kept.append(position)
                except BastionError:
                    failed.append(listing.files[int(rows[name][position])][0])
            rows[name] = rows[name][torch.tensor(kept, dtype=torch.long)]
    if failed and not worker:
        listed = ", ".join(sorted(failed)[:20]) + (" …" if len(failed) > 20 else "")
        console.print(f"skipped {len(failed)} pictures that cannot be read: {listed}", markup=False)
    return replace(parts, **rows), sorted(failed)


def _columns(class_map: str, parts: _Parts) -> tuple[int, ...]:
    columns = class_columns(class_map, parts.test.classes, parts.test.folder)
    # A model trained on these folders has its classes in their order: with as many, the map would be ambiguous.
    if len(parts.train_rows) and sorted(columns) == list(range(len(columns))) != list(columns):
        raise BastionError(
            f"class_map: {parts.test.folder}: its folders are all classes of the map, but in another order than those "
            "of the folders' names, in which a model would be trained; set test_only: true, which is for measuring"
        )
    return columns


def _stem(path: str) -> str:
    return os.path.splitext(path)[0]


def _training_root(root: Path) -> Path:
    """Return `root/train`, or `root` itself if it holds only class folders."""
    if not is_folder(root):
        raise BastionError(f"{root}: no such folder; it must be a folder of class folders")
    # A `train` without folders in it may be a class: pictures of trains.
    return root / "train" if is_folder(root / "train") and _folders(root / "train") else root


def _training_folder(root: Path) -> tuple[Listing, Tensor, Tensor]:
    """Return the listing for training, its rows for training and validation, and its rows for testing."""
    listing = list_pictures(_training_root(root))
    if listing.folder == root:
        return listing, *_held_out(listing)
    return listing, torch.arange(len(listing.files)), torch.empty(0, dtype=torch.long)


def _check_classes(root: Path, train: Listing, test: Listing) -> None:
    if train.classes != test.classes:
        unmatched = sorted({*train.classes} ^ {*test.classes})
        raise BastionError(
            f"{root}: {train.folder.name} and {test.folder.name} must have the same class folders; in one of "
            f"them only: {', '.join(unmatched[:5])}{' …' if unmatched[5:] else ''} ({len(unmatched)} in all)"
        )


def _test_name(root: Path, given: str | None) -> str:
    names = [name for name in _TEST_FOLDERS if is_folder(root / name)] if given is None else [given]
    if not names:
        raise BastionError(
            f"{root}: has `train` but none of {', '.join(_TEST_FOLDERS)}; give {root / 'train'} as `root` to "
            f"test on {_TEST_PERCENT} % of it"
        )
    if len(names) > 1:
        raise BastionError(f"{root}: has {' and '.join(names)}; say which one is measured with `test_folder`")
    return names[0]


def _held_out(listing: Listing) -> tuple[Tensor, Tensor]:
    """Return rows to train on, and rows to test on: the first 20 % of each class, at least one picture."""
    held = torch.zeros(len(listing.files), dtype=torch.bool)
    for label, name in enumerate(listing.classes):
        members = (listing.labels == label).nonzero().flatten()
        if len(members) < 2:
            raise BastionError(f"{listing.folder / name}: one picture; training and testing need one each")
        held[members[: max(1, len(members) * _TEST_PERCENT // 100)]] = True
    return (~held).nonzero().flatten(), held.nonzero().flatten()


def list_pictures(folder: Path) -> Listing:
    """List the pictures below the class folders of `folder`; a class without any is an error."""
    classes = _folders(folder)
    if not classes:
        raise BastionError(f"{folder}: no class folders in it; expected {folder}/CLASS/*.jpg")
    found = []
    with bar(f"listing {folder}", None):
        for label, name in enumerate(classes):
            pictures = [(path, size, label) for path, size in _pictures(folder, name)]
            if not pictures:
                raise BastionError(f"{folder / name}: no pictures ({' '.join(sorted(_SUFFIXES))}) in this class folder")
            found += pictures
    found.sort(key=lambda file: hashlib.sha256(file[0].encode()).digest())
    return Listing(
        folder=folder,
        classes=tuple(classes),
        files=tuple((path, size) for path, size, _ in found),
        labels=torch.tensor([label for _, _, label in found]),
    )


def _folders(folder: Path) -> list[str]:
    return [item.name for item in _items(folder) if _is_dir(item)]


def _is_dir(item: os.DirEntry[str]) -> bool:
    try:
        return item.is_dir()
    except OSError:  # a link to itself
        return False


def _items(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder that are not hidden, sorted by name."""
    with reading(folder):
        items = sorted(
            (item for item in os.scandir(folder) if not item.name.startswith(".")), key=lambda item: item.name
        )
    for item in items:
        if printable(item.name) != item.name or "\n" in item.name:
            raise BastionError(f"{item.path}: its name is not text in UTF-8, or has control characters; rename it")
    return items


def _pictures(root: Path, below: str, above: tuple[str, ...] = ()) -> Iterator[tuple[str, int]]:
    """Yield the path relative to `root`, with forward slashes, and the size of each picture in a folder.

    `above`: real paths of the enclosing folders, to detect links that form a cycle.
    """
    own = os.path.realpath(root / below)
    if own in above:
        raise BastionError(f"{root / below}: a link to a folder that it lies in; remove it")
    for item in _items(root / below):
        path = f"{below}/{item.name}"
        if _is_dir(item):
            yield from _pictures(root, path, (*above, own))
        elif os.path.splitext(item.name)[1].lower() in _SUFFIXES:
            if not os.path.isfile(item.path) if item.is_symlink() else not item.is_file():
                raise BastionError(f"{item.path}: a broken link, or not a file; repair or remove it")
            yield path, item.stat().st_size

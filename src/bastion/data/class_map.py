"""Maps class folders of a data set to outputs of a model."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from timm.data import ImageNetInfo

from bastion import storage
from bastion.errors import BastionError, did_you_mean

MAPS = ("imagenet",)
MOST = 10**9  # outputs of a model


def class_columns(class_map: str, folders: Sequence[str], root: Path) -> tuple[int, ...]:
    """Return the output column of each folder: in ImageNet's order of classes (`imagenet`), or from a file.

    ImageNet's classes may be WordNet ids (n01440764), numbers (0000, 0) or names (tench). A file is JSON
    `{"folder": column}`, or has lines of a folder and its column, separated by a comma or blanks.
    """
    known = _imagenet() if class_map in MAPS else _read(Path(class_map).expanduser())
    what = "ImageNet class" if class_map in MAPS else f"folder of {class_map}"
    found = [known.get(folder, known.get(_plain(folder)) if class_map in MAPS else None) for folder in folders]
    unknown = [folder for folder, column in zip(folders, found, strict=True) if column is None]
    if unknown:
        some = ", ".join(unknown[:5]) + (" …" if unknown[5:] else "")
        raise BastionError(
            f"class_map: {root}: {len(unknown)} of {len(folders)} class folders are no {what}: {some}; "
            "rename or remove them, or give a file with all of them"
        )
    columns = tuple(column for column in found if column is not None)
    if twice := [column for column, count in Counter(columns).items() if count > 1]:
        same = [folder for folder, column in zip(folders, columns, strict=True) if column == twice[0]]
        raise BastionError(
            f"class_map: {root}: folders {' and '.join(same)} are both column {twice[0]}; each needs its own"
        )
    return columns


@cache
def _imagenet() -> dict[str, int]:
    """Return columns by WordNet id, by number with any leading zeros, and by name if it is unique."""
    info = ImageNetInfo("imagenet-1k")
    ids = {name: column for column, name in enumerate(info.label_names())}
    numbers = {f"{column:0{digits}}": column for column in ids.values() for digits in range(1, 6)}
    names = [
        (_plain(name), column) for column, text in enumerate(info.label_descriptions()) for name in text.split(",")
    ]
    count = Counter(name for name, _ in names)
    return {name: column for name, column in names if count[name] == 1} | numbers | ids


def _plain(name: str) -> str:
    """Normalise a name: `English_springer` becomes `english springer`."""
    return re.sub(r"[\W_]+", " ", name).strip().lower()


def _read(path: Path) -> dict[str, int]:
    if not storage.is_file(path):
        raise BastionError(f"class_map: no file {path}, and no map of this name{did_you_mean(str(path), MAPS)}")
    text = storage.read_text(path)
    return _from_json(text, path) if path.suffix == ".json" else _from_lines(text, path)


def _from_json(text: str, path: Path) -> dict[str, int]:
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BastionError(f"class_map: {path}: not readable as JSON, or cut off ({error})") from error
    if not isinstance(content, Mapping) or not all(
        type(value) is int and 0 <= value < MOST for value in content.values()
    ):
        raise BastionError(f'class_map: {path}: expected {{"folder": column, …}}, columns being numbers from 0')
    return dict(content)


def _from_lines(text: str, path: Path) -> dict[str, int]:
    known: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        column = re.split(r"[,\s]", line.strip())[-1]
        name = line.strip().removesuffix(column).rstrip().rstrip(",").rstrip()
        is_pair = bool(name) and column.isdecimal() and len(column) < len(str(MOST))
        if not is_pair or name in known:
            wrong = (
                "has a folder for the second time" if is_pair else "is not a folder and its column, such as `cat,281`"
            )
            raise BastionError(f"class_map: {path}: line {number} {wrong}: {line.strip()[:60]!r}")
        known[name] = int(column)
    return known

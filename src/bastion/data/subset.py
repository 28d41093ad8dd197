"""Lists of pictures to measure on: RobustBench's 5,000 of ImageNet, or a user's file."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from bastion import storage
from bastion.errors import BastionError, did_you_mean

SUBSETS = ("robustbench",)
_ROBUSTBENCH_FILE = "helper_files/imagenet_test_image_ids.txt"  # in the package of that name
_ROBUSTBENCH_SHA256 = "d4121626d07722a0126c35b1563042e46a546f1a05ce705f2cdc635896d58574"


def read_subset(subset: str) -> tuple[list[str], str]:
    """Return the paths of a list, one per line, relative to the folder of class folders, and its SHA-256."""
    path = _robustbench() if subset in SUBSETS else Path(subset).expanduser()
    if not storage.is_file(path):
        raise BastionError(f"subset: no file {path}, and no list of this name{did_you_mean(subset, SUBSETS)}")
    text = storage.read_text(path)
    paths = [line.strip() for line in text.splitlines() if line.strip()]
    digest = hashlib.sha256(text.encode()).hexdigest()
    if subset in SUBSETS and digest != _ROBUSTBENCH_SHA256:
        raise BastionError(
            f"subset: {path} is not RobustBench's list: SHA-256 {digest[:12]}…, expected {_ROBUSTBENCH_SHA256[:12]}…; "
            "install robustbench again, or give your list by its path"
        )
    if not paths or len(set(paths)) < len(paths):
        wrong = "names a picture twice" if paths else "is empty"
        raise BastionError(f"subset: {path} {wrong}; expected one path a line, such as n01440764/picture.JPEG")
    return paths, digest


def subset_rows(paths: list[str], rows: Mapping[str, int], folder: Path) -> Tensor:
    """Return the rows of these pictures, in this order; `rows`: of all pictures that can be measured, by path."""
    missing = [path for path in paths if path not in rows]
    if missing:
        some = ", ".join(missing[:3]) + (" …" if missing[3:] else "")
        raise BastionError(
            f"subset: {len(missing)} of the {len(paths)} pictures of the list are not in {folder}: {some}; "
            "complete the folder, or give a list of what there is"
        )
    return torch.tensor([rows[path] for path in paths])


def _robustbench() -> Path:
    """Find the list of the package robustbench without importing it."""
    spec = importlib.util.find_spec("robustbench")
    places = (spec.submodule_search_locations or []) if spec else []
    if not places:
        raise BastionError("subset: robustbench is not installed; `pip install --no-deps robustbench` has the list")
    return Path(places[0]) / _ROBUSTBENCH_FILE

"""Data sets: the registry, and how to get them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from bastion.data.corrupted import corrupted
from bastion.registry import Registry
from bastion.types import DataSet

datasets: Registry[DataSet] = Registry("data set", __name__, DataSet, finish=corrupted)

# name -> get(source): download the data set, or read the file or folder `source`, and store it in the cache.
acquirers: dict[str, Callable[[Path | None], Path]] = {}


def cache_folder() -> Path:
    """Return the folder of downloaded data sets."""
    return Path(os.environ.get("BASTION_DATA") or Path.home() / ".cache" / "bastion").expanduser()

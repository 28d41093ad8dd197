"""Reading archives that came over the network: nothing is unpacked to disk, nothing in them is run."""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from bastion.errors import BastionError

_MOST_BYTES = 1 << 28  # a member; those of the data sets here have at most 150 MB

# The one function that numpy's pickles call; its module moved in numpy 2, and the old name warns.
_reconstruct = np.empty(0).__reduce__()[0]

_ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
}


def read_members(path: Path, wanted: Collection[str]) -> dict[str, bytes]:
    """Those wanted files that a tar archive has, read in one pass: going back in gzip means starting over."""
    members = {}
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name in wanted and member.isfile() and member.size <= _MOST_BYTES:
                    content = tar.extractfile(member)
                    members[member.name] = content.read() if content else b""
    except FileNotFoundError:
        raise BastionError(f"{path}: no such file") from None
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise BastionError(f"{path}: not a tar archive, or cut off ({error})") from error
    return members


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None


def unpickle(content: bytes, where: str) -> Any:
    """The numpy arrays, numbers, strings, lists and dicts of a pickle; strings of Python 2 become bytes.

    An ordinary unpickler imports and calls whatever the file names. This one knows four names, and none of
    them can do more than make an array.
    """
    try:
        return _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # arbitrary bytes can make an unpickler raise anything
        raise BastionError(f"{where}: not a pickle of plain arrays: {error}") from error

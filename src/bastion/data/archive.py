"""Reading archives that came over the network: nothing is unpacked to disk, nothing in them is run."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bastion import storage
from bastion.errors import BastionError

_MOST_BYTES = 1 << 28  # a member; those of the data sets here have at most 150 MB
_MOST_IN_ALL = 1 << 30  # the published archives have 190 MB


class _Array:
    """Stands in for numpy's array while a pickle is read: takes bytes and a shape, and nothing else."""

    def __init__(self, *_: Any) -> None:
        self.pixels: NDArray[np.uint8] = np.empty(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, _, content = state
        if not isinstance(kind, _Bytes) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("it holds an array that is not of bytes")
        self.pixels = np.frombuffer(content, np.uint8).reshape(shape)


class _Bytes:
    """Stands in for numpy's dtype; only unsigned bytes are known."""

    def __init__(self, kind: Any, *_: Any) -> None:
        if kind not in (b"u1", "u1"):
            raise pickle.UnpicklingError(f"it holds an array of {kind!r}")

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and the like, which bytes have none of


# All that a pickled array names. numpy's own would do more than make one: their arguments can forge pointers.
_ALLOWED = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Bytes,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
}


def read_members(path: Path, wanted: Collection[str]) -> dict[str, bytes]:
    """Those wanted files that a tar archive has, read in one pass: going back in gzip means starting over."""
    members = {}
    try:
        with storage.opened(path) as file, tarfile.open(fileobj=file) as tar:
            for member in tar:
                if tar.offset > _MOST_IN_ALL:
                    raise tarfile.ReadError(f"it holds more than {_MOST_IN_ALL:,} bytes")
                if member.name in wanted and member.isfile() and member.size <= _MOST_BYTES:
                    content = tar.extractfile(member)
                    members[member.name] = content.read() if content else b""
    except BastionError:
        raise
    except Exception as error:  # arbitrary bytes can make its readers raise anything
        raise BastionError(f"{path}: not a tar archive, or cut off ({error or type(error).__name__})") from error
    return members


class _Unpickler(pickle._Unpickler):  # in Python: that in C makes a table as long as the file tells it to
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None


def unpickle(content: bytes, where: str) -> Any:
    """The byte arrays, numbers, strings, lists and dicts of a pickle; strings of Python 2 become bytes.

    An ordinary unpickler imports and calls whatever the file names. This one knows the names of an array, and
    puts its own harmless classes in their place.
    """
    try:
        return _plain(_Unpickler(io.BytesIO(content), encoding="bytes").load())
    except Exception as error:  # arbitrary bytes can make an unpickler raise anything
        raise BastionError(f"{where}: not a pickle of plain arrays: {error}") from error


def _plain(value: Any) -> Any:
    """The value, or the values of a dict, with arrays in the place of their stand-ins."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.pixels if isinstance(value, _Array) else value

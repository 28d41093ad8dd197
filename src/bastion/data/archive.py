"""Reads downloaded archives safely: nothing is unpacked to disk, no code in them is run."""

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

_MOST_BYTES = 1 << 28  # of a member; the data sets here have at most 150 MB
_MOST_TOTAL = 1 << 30  # the published archives have 190 MB


class _Array:
    """Replaces numpy's array during unpickling: accepts only bytes and a shape."""

    def __init__(self, *_: Any) -> None:
        self.pixels: NDArray[np.uint8] = np.empty(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, _, content = state
        if not isinstance(kind, _Bytes) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("it holds an array that is not of bytes")
        self.pixels = np.frombuffer(content, np.uint8).reshape(shape)


class _Bytes:
    """Replaces numpy's dtype during unpickling: accepts only uint8."""

    def __init__(self, kind: Any, *_: Any) -> None:
        if kind not in (b"u1", "u1"):
            raise pickle.UnpicklingError(f"it holds an array of {kind!r}")

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and alignment, irrelevant for bytes


# All names in a pickled array. numpy's own classes are not safe: their arguments can forge pointers.
_ALLOWED = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Bytes,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
}


def read_members(path: Path, wanted: Collection[str]) -> dict[str, bytes]:
    """Read those of the wanted files that a tar archive has, in one pass, as seeking in gzip is slow."""
    members = {}
    try:
        with storage.opened(path) as file, tarfile.open(fileobj=file) as tar:
            for member in tar:
                if tar.offset > _MOST_TOTAL:
                    raise tarfile.ReadError(f"it holds more than {_MOST_TOTAL:,} bytes")
                if member.name in wanted and member.isfile() and member.size <= _MOST_BYTES:
                    content = tar.extractfile(member)
                    members[member.name] = content.read() if content else b""
    except BastionError:
        raise
    except Exception as error:  # arbitrary bytes can make tarfile raise anything
        raise BastionError(f"{path}: not a tar archive, or cut off ({error or type(error).__name__})") from error
    return members


class _Unpickler(pickle._Unpickler):  # the Python version: the C version allocates a table as long as the file claims
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None


def unpickle(content: bytes, where: str) -> Any:
    """Read byte arrays, numbers, strings, lists and dicts from a pickle; strings of Python 2 become bytes.

    An ordinary unpickler imports and calls whatever the file names. This one accepts only the names in an array, and
    replaces them by harmless classes.
    """
    try:
        return _plain(_Unpickler(io.BytesIO(content), encoding="bytes").load())
    except Exception as error:  # arbitrary bytes can make an unpickler raise anything
        raise BastionError(f"{where}: not a pickle of plain arrays: {error}") from error


def _plain(value: Any) -> Any:
    """Replace `_Array` by arrays, also in the values of a dict."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.pixels if isinstance(value, _Array) else value

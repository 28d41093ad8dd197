"""Atomically written files with checksums: JSON, arrays, hashes. No torch, no pickle."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as _encode_arrays

from bastion.errors import BastionError
from bastion.files import files as files
from bastion.files import is_file as is_file
from bastion.files import is_folder as is_folder
from bastion.files import opened as opened
from bastion.files import read_text as read_text
from bastion.files import reading as reading

Arrays = dict[str, np.ndarray[Any, Any]]
FORMAT = 2  # of JSON files; those of format 1, or without a format, have no checksum
_HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
_TEMPORARY = re.compile(rf"\..*\.{_HOST}-(\d+)-[0-9a-f]{{8}}\.tmp")


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` if the block succeeds, and is removed otherwise."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{_HOST}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise disk_error(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def remove_leftovers(folder: Path, pattern: str = "**/.*.tmp") -> None:
    """Delete temporary files of this machine's killed processes, never of running ones."""
    with suppress(OSError):  # the folder may not be writable or readable
        for path in folder.glob(pattern):
            writer = _TEMPORARY.fullmatch(path.name)
            if writer and not _is_alive(int(writer[1])):
                path.unlink()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def sync(path: Path) -> None:
    """Flush the file, or the folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file if it is still there."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(path, error) from error


def check_writable(folder: Path) -> None:
    """Raise if no file can be created in the folder, before work is done whose results go there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise disk_error(folder, error) from error


def disk_error(path: Path, error: OSError) -> BastionError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BastionError(
            f"{path}: no space left on the disk; what was stored before is intact: free some space and run again"
        )
    return BastionError(f"{path}: cannot be written: {error.strerror or error}; check the path and its permissions")


def write_bytes(path: Path, content: bytes) -> None:
    with atomic(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, content: str) -> None:
    remove_leftovers(path.parent, f".{glob.escape(path.name)}.*.tmp")
    write_bytes(path, content.encode(errors="backslashreplace"))  # surrogates of undecodable paths, as JSON writes them


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object with the checksum of its content."""
    sealed = {"format": FORMAT, **content}
    write_text(path, json.dumps({**sealed, "sha256": _checksum(sealed)}, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote and check its checksum. Files from before there were checksums are not checked.

    One wrong bit cannot make a file look that old, as it would have to remove both the format and the checksum.
    """
    try:
        content = json.loads(read_text(path))
        stored = content.pop("sha256", None) if isinstance(content, dict) else None
        checksum = _checksum(content)
    except (ValueError, RecursionError) as error:
        raise BastionError(f"{path}: not readable as JSON ({error}); restore or remove it") from error
    if not isinstance(content, dict):
        raise BastionError(f"{path}: expected an object, got {type(content).__name__}; restore or remove it")
    if stored is None and content.get("format", 1) == 1:
        return content
    if stored != checksum or content.pop("format", None) != FORMAT:
        raise BastionError(f"{path}: damaged or edited: it does not match its checksum; restore or remove it")
    return content


def _checksum(content: Any) -> str:
    return fingerprint(content, digits=64)


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file with the SHA-256 of each array and of its metadata. Equal content gives equal bytes."""
    plain = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    digests = json.dumps({name: digest({name: array}) for name, array in plain.items()}, sort_keys=True)
    sealed = {**(metadata or {}), "digests": digests}
    write_bytes(path, _ordered(_encode_arrays(plain, metadata={**sealed, "checksum": _checksum(sealed)})))


def _ordered(encoded: bytes) -> bytes:
    """Sort the keys of the header, whose order safetensors leaves random."""
    start = 8 + int.from_bytes(encoded[:8], "little")
    header = json.dumps(json.loads(encoded[8:start]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return b"".join([len(header).to_bytes(8, "little"), header, memoryview(encoded)[start:]])


def read_arrays(path: Path, names: Collection[str] | None = None) -> tuple[Arrays, dict[str, str]]:
    """Read and check the arrays of a safetensors file, all or those in `names`, and its metadata."""
    with _arrays_in(path) as file:
        stored, metadata = set(file.keys()), file.metadata() or {}
        arrays = {name: file.get_tensor(name) for name in sorted(stored) if names is None or name in names}
    if "sha256" in metadata and names is None:  # from before metadata had a checksum
        whole = metadata.pop("sha256") == digest(arrays)
    else:
        whole = metadata.pop("checksum", None) == _checksum(metadata)
        digests = json.loads(metadata.pop("digests", "{}")) if whole else {}
        whole = whole and stored == digests.keys()
        whole = whole and all(digests[name] == digest({name: array}) for name, array in arrays.items())
    if not whole:
        raise BastionError(f"{path}: corrupt: its bytes do not match its SHA-256; remove it and make it again")
    return arrays, metadata


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a safetensors file, unchecked."""
    with _arrays_in(path) as file:
        return file.metadata() or {}


def array_names(path: Path) -> list[str]:
    with _arrays_in(path) as file:
        return sorted(file.keys())


@contextmanager
def _arrays_in(path: Path) -> Iterator[Any]:
    check_safetensors(path)
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        raise BastionError(f"{path}: corrupt or truncated ({error}); remove it and make it again") from error


def check_safetensors(path: Path) -> None:
    """Raise if a file is not safetensors, above all if it is a pickle, without loading it."""
    with opened(path) as file:
        head = file.read(9)
    if head[8:9] == b"{":  # the JSON header, after eight bytes of its length
        return
    if head[:2] == b"PK" or head[:1] == b"\x80":
        raise BastionError(
            f"{path}: a pickle, which can run code when it is loaded; bastion loads weights from safetensors only: "
            "convert it with `torch.load(path, weights_only=True)` and `safetensors.torch.save_file`"
        )
    raise BastionError(
        f"{path}: not a safetensors file, or cut off after {len(head)} bytes; remove it, and get or make it again"
    )


def sha256(*parts: bytes | memoryview | np.ndarray[Any, Any]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.ascontiguousarray(part).data if isinstance(part, np.ndarray) else part)
    return digest.hexdigest()


def digest(arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Return the SHA-256 over names, types, shapes and bytes."""
    named = [(f"{name} {array.dtype} {array.shape}".encode(), array) for name, array in sorted(arrays.items())]
    return sha256(*(part for pair in named for part in pair))


def fingerprint(content: Any, digits: int = 12) -> str:
    """Return a short hash of JSON content, independent of the order of its keys."""
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())[:digits]

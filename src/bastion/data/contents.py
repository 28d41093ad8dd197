"""Hashes the contents of picture files, so that changed pictures count as other data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bastion import storage
from bastion.data import cache_folder
from bastion.errors import BastionError
from bastion.progress import bar


def contents_digest(folder: Path, paths: Sequence[str]) -> str:
    """Return the SHA-256 over these files. Hashes are cached until a file's size, times or inode change."""
    cache = cache_folder() / "contents" / f"{storage.fingerprint(str(folder.resolve()))}.json"
    known: dict[str, list[object]] = {}
    with suppress(BastionError):  # no cache yet, or damaged
        stored = storage.read_json(cache)
        known = {path: state for path, state in stored.items() if isinstance(state, list)}
    found, total = {}, hashlib.sha256()
    with bar(f"reading {folder}", len(paths)) as advance:
        for path in paths:
            found[path] = _digest(folder / path, known.get(path))
            total.update(f"{path}\0{found[path][-1]}\0".encode())
            advance()
    if any(known.get(path) != entry for path, entry in found.items()):
        with suppress(BastionError):  # a cache that cannot be written costs time only
            storage.write_json(cache, known | found)
    return total.hexdigest()


def _digest(path: Path, known: list[object] | None) -> list[object]:
    """Return size, times and inode of a file, then the SHA-256 of its bytes."""
    with storage.reading(path):
        stat = path.stat()
    state: list[object] = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    if known and known[:-1] == state:
        return known
    with storage.opened(path) as file:
        return [*state, hashlib.file_digest(file, "sha256").hexdigest()]

"""Reads untrusted files and folders: system errors become one line, and pipes are refused."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from bastion.errors import BastionError


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn a system error about a file or folder into a BastionError."""
    try:
        yield
    except FileNotFoundError:
        raise BastionError(f"{path}: no such file") from None
    except OSError as error:
        raise BastionError(f"{path}: cannot be read: {error.strerror or error}") from error


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """Open a regular file; refuse a pipe or a device, which could block for ever."""
    path = Path(path)
    with reading(path), open(path, "rb", opener=_nonblocking) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        yield file


def _nonblocking(name: str, flags: int) -> int:
    """Open without blocking on a pipe."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def read_text(path: Path) -> str:
    with opened(path) as file:
        content = file.read()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BastionError(
            f"{path}: cannot be read: not text in UTF-8 ({error.reason} at byte {error.start})"
        ) from None


def is_file(path: Path | str) -> bool:
    """Whether there is a regular file; raise if that cannot be determined, as in an unreadable folder."""
    with reading(Path(path)):
        return Path(path).is_file()


def is_folder(path: Path | str) -> bool:
    with reading(Path(path)):
        return Path(path).is_dir()


def files(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a folder that match, sorted; none if there is no folder.

    Raise if the folder may not be read, where `Path.glob` would silently find nothing.
    """
    with reading(folder):
        try:
            return [folder / name for name in sorted(os.listdir(folder)) if fnmatchcase(name, pattern)]
        except (FileNotFoundError, NotADirectoryError):
            return []

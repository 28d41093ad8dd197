"""Files and folders that others made: what the system says of them is one line, and a pipe is not waited for."""

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
    """What the system says of a file or folder that cannot be read, in a line."""
    try:
        yield
    except FileNotFoundError:
        raise BastionError(f"{path}: no such file") from None
    except OSError as error:
        raise BastionError(f"{path}: cannot be read: {error.strerror or error}") from error


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """A regular file. A pipe or a device under its name would be waited for, perhaps for ever: it is refused."""
    path = Path(path)
    with reading(path), open(path, "rb", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        yield file


def _without_waiting(name: str, flags: int) -> int:
    """Opening a pipe would wait for somebody who writes into it."""
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
    """Is there a regular file? What keeps one from knowing, such as a folder that may not be read, is an error."""
    with reading(Path(path)):
        return Path(path).is_file()


def is_folder(path: Path | str) -> bool:
    with reading(Path(path)):
        return Path(path).is_dir()


def files(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder with such names, in order; none if there is no folder.

    A folder that may not be read is an error, where `Path.glob` would find nothing in it without a word.
    """
    with reading(folder):
        try:
            return [folder / name for name in sorted(os.listdir(folder)) if fnmatchcase(name, pattern)]
        except (FileNotFoundError, NotADirectoryError):
            return []

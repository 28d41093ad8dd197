"""A download over HTTP that goes on where it broke off, and ends whatever the server does."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from queue import Empty, SimpleQueue
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from bastion import storage
from bastion.errors import BastionError
from bastion.progress import bar

_TIMEOUT = 10.0  # seconds between two packets
_PATIENCE = 60.0  # seconds until the server's first word, and until _LEAST more bytes
_LEAST = 1 << 12  # bytes, of a try that counts
_MOST = 1 << 30  # bytes of a file: several times what the data sets here have
_CHUNK = 1 << 18


def part_of(path: Path) -> Path:
    """Where what is not yet complete is kept."""
    return path.with_name(f"{path.name}.part")


def download(url: str, path: Path, *, md5: str | None = None) -> Path:
    """Fetch `url` to `path`, which appears only when it is complete.

    Bytes already in `path`.part are not fetched again, be they of this call or of an earlier process. As long
    as a try brings new bytes another follows; the first that brings hardly any is the end, and its cause is told.
    """
    part = part_of(path)
    part.parent.mkdir(parents=True, exist_ok=True)
    while True:
        before = _size(part)
        try:
            if _fetch_rest(url, part):
                break
            cause = f"the server closed the connection after {_size(part):,} bytes"
        except (OSError, HTTPException, ValueError) as error:
            cause = _reason(error)
        if _size(part) < before + _LEAST:
            raise BastionError(f"{url}: {cause}")
    _check_md5(part, md5, url)
    os.replace(part, path)
    return path


def file_md5(path: Path) -> str:
    """The checksum that data sets were published with: against accidents, not against forgers."""
    with storage.opened(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _check_md5(part: Path, expected: str | None, url: str) -> None:
    if expected is not None and (got := file_md5(part)) != expected:
        part.unlink()  # or the next try would go on from the wrong bytes
        raise BastionError(f"{url}: MD5 {got}, expected {expected}: not the published file")


def _fetch_rest(url: str, part: Path) -> bool:
    """Append to `part` what it lacks; whether it is complete now."""
    done = _size(part)
    try:
        response = _asked(Request(url, headers=_headers(done)))
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
    length = response.headers.get("Content-Length", "")
    total = done + int(length) if length.isdecimal() else None
    with part.open("ab") as file, bar(f"fetching {part.stem}", total, done, unit="bytes") as advance:
        file.truncate(done)
        for chunk in _chunks(response):
            file.write(chunk)
            advance(len(chunk))
            if file.tell() > _MOST:
                raise BastionError(f"{response.url}: sends more than {_MOST:,} bytes: not a file that bastion knows")
    return total is None or _size(part) == total


def _chunks(response: HTTPResponse) -> Iterator[bytes]:
    """The body as it comes. A server that sends a byte now and then would never run into a time limit of its own."""
    since, got = time.monotonic(), 0
    while chunk := response.read1(_CHUNK):
        yield chunk
        got += len(chunk)
        if got >= _LEAST:
            since, got = time.monotonic(), 0
        elif time.monotonic() - since > _PATIENCE:
            raise TimeoutError(f"the server sent {got:,} bytes in {_PATIENCE:.0f} seconds")


def _asked(request: Request) -> HTTPResponse:
    """The server's answer up to its headers, which it might send byte by byte, too: in a thread that can be left."""
    answers: SimpleQueue[HTTPResponse | Exception] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put(urlopen(request, timeout=_TIMEOUT))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=_PATIENCE)
    except Empty:
        raise TimeoutError(f"the server did not answer in {_PATIENCE:.0f} seconds") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _headers(done: int) -> dict[str, str]:
    agent = {"User-Agent": "bastion"}
    return {**agent, "Range": f"bytes={done}-"} if done else agent


def _total(content_range: str | None) -> int | None:
    """The N of `bytes */N`."""
    total = (content_range or "").rpartition("/")[2]
    return int(total) if total.isdecimal() else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: OSError | HTTPException | ValueError) -> str:
    reason = getattr(error, "reason", error)  # URLError wraps the socket's own error
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__

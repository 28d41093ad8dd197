"""HTTP download that resumes after interruptions and never hangs."""

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
_PATIENCE = 60.0  # seconds until the response, and for each further _LEAST bytes
_LEAST = 1 << 12  # bytes that a try must bring to be followed by another
_MOST = 1 << 30  # bytes of a file, several times the largest one here
_CHUNK = 1 << 18


def part_of(path: Path) -> Path:
    """Return the path of the partial download."""
    return path.with_name(f"{path.name}.part")


def download(url: str, path: Path, *, md5: str | None = None) -> Path:
    """Fetch `url` to `path`, which is created only when it is complete.

    Bytes already in `path`.part, from this or an earlier call, are not fetched again. It retries as long as a try
    brings new bytes, and raises the cause of the first that brings hardly any.
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
    """Return the MD5, which data sets were published with: it detects accidents, not forgery."""
    with storage.opened(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _check_md5(part: Path, expected: str | None, url: str) -> None:
    if expected is not None and (got := file_md5(part)) != expected:
        part.unlink()  # or the next call would resume from the wrong bytes
        raise BastionError(f"{url}: MD5 {got}, expected {expected}: not the published file")


def _fetch_rest(url: str, part: Path) -> bool:
    """Append the missing bytes to `part`; return whether it is complete."""
    done = _size(part)
    try:
        response = _open(Request(url, headers=_headers(done)))
    except HTTPError as error:
        with error:
            if error.code != 416 or not done:
                raise
            if _total(error.headers.get("Content-Range")) == done:  # we have all bytes
                return True
        part.unlink()  # longer than the file: not the same file
        return _fetch_rest(url, part)
    with response:
        return _receive(response, part, done)


def _receive(response: HTTPResponse, part: Path, done: int) -> bool:
    if response.status != 206:  # the server ignores the range and sends everything
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
    """Yield the body; raise if it is too slow, as a socket timeout never ends a server that sends byte by byte."""
    since, got = time.monotonic(), 0
    while chunk := response.read1(_CHUNK):
        yield chunk
        got += len(chunk)
        if got >= _LEAST:
            since, got = time.monotonic(), 0
        elif time.monotonic() - since > _PATIENCE:
            raise TimeoutError(f"the server sent {got:,} bytes in {_PATIENCE:.0f} seconds")


def _open(request: Request) -> HTTPResponse:
    """Return the response after its headers, read in a thread that can be abandoned if the server is too slow."""
    responses: SimpleQueue[HTTPResponse | Exception] = SimpleQueue()

    def fetch() -> None:
        try:
            responses.put(urlopen(request, timeout=_TIMEOUT))
        except Exception as error:
            responses.put(error)

    threading.Thread(target=fetch, daemon=True).start()
    try:
        response = responses.get(timeout=_PATIENCE)
    except Empty:
        raise TimeoutError(f"the server did not answer in {_PATIENCE:.0f} seconds") from None
    if isinstance(response, Exception):
        raise response
    return response


def _headers(done: int) -> dict[str, str]:
    agent = {"User-Agent": "bastion"}
    return {**agent, "Range": f"bytes={done}-"} if done else agent


def _total(content_range: str | None) -> int | None:
    """Return the N of `bytes */N`."""
    total = (content_range or "").rpartition("/")[2]
    return int(total) if total.isdecimal() else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: OSError | HTTPException | ValueError) -> str:
    reason = getattr(error, "reason", error)  # URLError wraps the socket's own error
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__

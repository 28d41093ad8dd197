"""Against a real HTTP server on this machine, with the faults that real servers have."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bastion.data.download import download, part_of
from bastion.errors import BastionError

CONTENT = bytes(range(256)) * 4096  # 1 MB


class Server:
    """Serves CONTENT; `breaks` lists after how many bytes the next answers break off."""

    def __init__(self, *, ranges: bool = True, breaks: tuple[int, ...] = (), status: int = 200) -> None:
        self.ranges, self.breaks, self.status = ranges, list(breaks), status
        self.asked: list[str | None] = []  # the Range of each request
        self.url = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        asked = request.headers.get("Range")
        self.asked.append(asked)
        if self.status != 200:
            request.send_error(self.status)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.ranges else 0
        if start >= len(CONTENT):
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(CONTENT)}")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        request.send_header("Content-Length", str(len(CONTENT) - start))
        request.end_headers()
        stop = start + self.breaks.pop(0) if self.breaks else len(CONTENT)
        request.wfile.write(CONTENT[start:stop])


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_port}/file"
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


def test_a_whole_file_arrives(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with serving(Server()) as server:
        download(server.url, path, md5=hashlib.md5(CONTENT).hexdigest())
    assert path.read_bytes() == CONTENT
    assert server.asked == [None]
    assert not part_of(path).exists()


def test_a_broken_download_goes_on_where_it_broke_off(tmp_path: Path) -> None:
    with serving(Server(breaks=(400_000, 300_000))) as server:
        download(server.url, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=400000-", "bytes=700000-"]


def test_the_part_of_an_earlier_process_is_not_fetched_again(tmp_path: Path) -> None:
    part_of(tmp_path / "file").write_bytes(CONTENT[:1000])
    with serving(Server()) as server:
        download(server.url, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.asked == ["bytes=1000-"]


def test_a_part_that_is_complete_needs_no_more_bytes(tmp_path: Path) -> None:
    part_of(tmp_path / "file").write_bytes(CONTENT)
    with serving(Server()) as server:
        download(server.url, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.asked == [f"bytes={len(CONTENT)}-"]


def test_a_part_longer_than_the_file_is_thrown_away(tmp_path: Path) -> None:
    part_of(tmp_path / "file").write_bytes(CONTENT + b"more")
    with serving(Server()) as server:
        download(server.url, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.asked == [f"bytes={len(CONTENT) + 4}-", None]


def test_a_server_that_ignores_ranges_starts_the_file_anew(tmp_path: Path) -> None:
    part_of(tmp_path / "file").write_bytes(b"x" * 1000)
    with serving(Server(ranges=False)) as server:
        download(server.url, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_server_that_always_breaks_off_at_one_place_is_given_up(tmp_path: Path) -> None:
    with (
        serving(Server(ranges=False, breaks=(5000,) * 9)) as server,
        pytest.raises(BastionError, match="closed the connection after 5,000 bytes"),
    ):
        download(server.url, tmp_path / "file")
    assert not (tmp_path / "file").exists()
    assert part_of(tmp_path / "file").read_bytes() == CONTENT[:5000]


def test_what_came_before_giving_up_is_kept_for_the_next_call(tmp_path: Path) -> None:
    with serving(Server(breaks=(5000, 0))) as server:
        with pytest.raises(BastionError, match="closed the connection"):
            download(server.url, tmp_path / "file")
        download(server.url, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=5000-", "bytes=5000-"]


def test_a_wrong_checksum_leaves_nothing_behind(tmp_path: Path) -> None:
    with serving(Server()) as server, pytest.raises(BastionError, match=f"MD5 .*, expected {'0' * 32}"):
        download(server.url, tmp_path / "file", md5="0" * 32)
    assert list(tmp_path.iterdir()) == []


def test_the_servers_own_word_is_told(tmp_path: Path) -> None:
    with serving(Server(status=404)) as server, pytest.raises(BastionError, match="/file: Not Found"):
        download(server.url, tmp_path / "file")
    assert server.asked == [None]


def test_no_server_is_an_error_at_once(tmp_path: Path) -> None:
    with serving(Server()) as server:
        pass
    with pytest.raises(BastionError, match="Connection refused"):
        download(server.url, tmp_path / "file")


@contextmanager
def speaking(say: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that answers whatever it is asked in its own way; its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    connection.recv(1 << 16)
                    say(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/file"


def _slowly(head: bytes) -> Callable[[socket.socket], None]:
    def say(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(b"x")
            time.sleep(0.02)

    return say


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", "the server sent .* bytes in 0 seconds"),
        (b"HTTP/1.1 200 OK\r\nX-Slow: ", "the server did not answer in 0 seconds"),
    ],
)
def test_a_server_that_sends_a_byte_at_a_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bytes, message: str
) -> None:
    monkeypatch.setattr("bastion.data.download._PATIENCE", 0.2)
    with speaking(_slowly(head)) as url, pytest.raises(BastionError, match=message):
        download(url, tmp_path / "file")
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort", "closed the connection after 5 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nlonger", "MD5 .*, expected 0: not the published file"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\nwhole", "MD5 .*, expected 0: not the published file"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nwhole", "MD5 .*, expected 0: not the published file"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nwhole", "IncompleteRead|invalid literal"),
        (b"HTTP/1.1 302 OK\r\nLocation: file:///etc/passwd\r\n\r\n", "Redirection to url 'file:///etc/passwd' is not"),
        (b"\x1b[31m nonsense\r\n\r\n", "�.31m nonsense|BadStatusLine"),
        (b"", "closed connection without response"),
    ],
)
def test_a_server_that_says_something_else_is_told_in_a_line(tmp_path: Path, answer: bytes, message: str) -> None:
    server = speaking(lambda connection: connection.sendall(answer))
    with server as url, pytest.raises(BastionError, match=message) as told:
        download(url, tmp_path / "file", md5="0")
    assert "\n" not in str(told.value)


def test_a_server_that_does_not_stop_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bastion.data.download._MOST", 100_000)
    with serving(Server()) as server, pytest.raises(BastionError, match="sends more than 100,000 bytes: not a file"):
        download(server.url, tmp_path / "file")

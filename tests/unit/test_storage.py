"""Files are whole or absent, and say what is wrong with them."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from tests.damage import complaints

from bastion import BastionError, storage


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    storage.write_text(path, "old")
    with pytest.raises(RuntimeError), storage.atomic(path) as temporary:
        temporary.write_text("half of the ne")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    storage.write_text(tmp_path / "a", "old")
    monkeypatch.setattr(os, call, full)
    with pytest.raises(
        BastionError, match=r"a: no space left on the disk; what was stored before is intact: free some"
    ):
        storage.write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_writer_left_beside_a_page_goes_with_the_next_one(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = [f".{name}.{storage._HOST}-{pid}-0123abcd.tmp" for name in ("a[1].html", "b.html") for pid in (gone.pid, 1)]
    for name in left:
        (tmp_path / name).write_text("half")
    storage.write_text(tmp_path / "a[1].html", "page")
    assert {path.name for path in tmp_path.iterdir()} == {"a[1].html", *left[1:]}  # others' and living ones' stay


def test_writing_where_one_may_not_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BastionError, match="cannot be written"):
        storage.write_text(tmp_path / "file" / "below", "x")


def test_new_files_have_ordinary_permissions(tmp_path: Path) -> None:
    storage.write_text(tmp_path / "a", "x")
    (tmp_path / "b").write_text("x")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


WRITER = """
import sys, numpy as np
from pathlib import Path
from bastion import storage
for i in range(10**9):
    storage.write_arrays(Path(sys.argv[1]), {"x": np.full(200_000, i), "y": np.full(3, i)})
    print(i, flush=True)
"""


def test_kill_9_while_writing_leaves_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "facts.safetensors"
    for pause in (0.0, 0.003, 0.011, 0.02):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()  # one file is there; the next is being written
        time.sleep(pause)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        arrays, _ = storage.read_arrays(path)
        assert len(set(arrays["x"].tolist()) | set(arrays["y"].tolist())) == 1


def test_arrays_come_back_with_their_types(tmp_path: Path) -> None:
    arrays = {
        "flag": np.array([True, False]),
        "index": np.arange(3),
        "x": np.float32([[1.5]]),
        "strided": np.arange(9)[::2],
    }
    storage.write_arrays(tmp_path / "a", arrays, {"note": "hello"})
    loaded, metadata = storage.read_arrays(tmp_path / "a")
    assert metadata == {"note": "hello"}
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        assert np.array_equal(loaded[name], array)


def test_the_same_content_is_the_same_bytes(tmp_path: Path) -> None:
    notes = {f"note {i}": str(i) for i in range(12)}
    for number in range(5):
        arrays = {f"column {i}": np.arange(5.0) + i for i in range(12)}
        storage.write_arrays(tmp_path / str(number), arrays, notes)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    back, metadata = storage.read_arrays(tmp_path / "0")
    assert metadata == notes
    assert all(np.array_equal(back[name], arrays[name]) for name in arrays)


def test_no_header_length_is_taken_for_a_pickle(tmp_path: Path) -> None:
    """The first byte of a safetensors file is the low byte of its header's length: 0x80 for one in 32."""
    for padding in range(40):
        storage.write_arrays(tmp_path / "a", {"x": np.zeros(1)}, {"padding": " " * 8 * padding})
        storage.read_arrays(tmp_path / "a")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"x": 1}), "a pickle, which can run code"),
        (b"PK\x03\x04 and so on", "a pickle, which can run code"),
        (b"hello, world", "not a safetensors file"),
        (b"", "not a safetensors file, or cut off after 0 bytes"),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f{}", "corrupt or truncated"),
    ],
)
def test_what_is_not_safetensors_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(BastionError, match=message):
        storage.read_arrays(tmp_path / "a")


def test_missing_and_broken_json_are_clear(tmp_path: Path) -> None:
    with pytest.raises(BastionError, match="no such file"):
        storage.read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"a": ')
    with pytest.raises(BastionError, match="not readable as JSON"):
        storage.read_json(tmp_path / "a.json")


def test_json_comes_back_as_it_was_written(tmp_path: Path) -> None:
    content = {"eps": 8 / 255, "classes": ["a", "é"], "nested": {"none": None}}
    storage.write_json(tmp_path / "a.json", content)
    assert storage.read_json(tmp_path / "a.json") == content


def test_a_flipped_bit_of_a_json_file_is_found_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    storage.write_json(path, {"eps": 0.1, "name": "pgd", "n": 12})
    found, tried = complaints(path, lambda: storage.read_json(path))
    assert len(found) > 0.8 * tried  # the rest is white space


@pytest.mark.parametrize("names", [None, ("x",)])
def test_a_flipped_bit_of_an_array_file_is_found_or_harmless(tmp_path: Path, names: tuple[str, ...] | None) -> None:
    path = tmp_path / "a.safetensors"
    storage.write_arrays(path, {"correct": np.array([True, False]), "x": np.float32([1, 2])}, {"seed": "0"})
    found, tried = complaints(path, lambda: storage.read_arrays(path, names))
    assert len(found) > 0.8 * tried


def test_files_from_before_checksums_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"format": 1, "created": "2026"}')
    assert storage.read_json(tmp_path / "a.json")["created"] == "2026"
    arrays = {"x": np.arange(3)}
    (tmp_path / "a").write_bytes(safetensors.numpy.save(arrays, {"sha256": storage.digest(arrays)}))
    assert storage.read_arrays(tmp_path / "a")[0]["x"].tolist() == [0, 1, 2]


def test_only_leftovers_of_dead_writers_are_removed(tmp_path: Path) -> None:
    with storage.atomic(tmp_path / "living") as living:
        living.write_text("half")
        dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
        pid = dead.stdout.strip()
        left = tmp_path / "deeper" / living.name.replace(f"-{os.getpid()}-", f"-{pid}-")
        left.parent.mkdir()
        left.write_text("half")
        storage.remove_leftovers(tmp_path)
        assert living.exists()
        assert not left.exists()


def test_a_fingerprint_does_not_depend_on_the_order_of_keys() -> None:
    assert storage.fingerprint({"a": 1, "b": [2]}) == storage.fingerprint({"b": [2], "a": 1})
    assert storage.fingerprint({"a": 1}) != storage.fingerprint({"a": 2})


@pytest.mark.parametrize("depth", [900, 960, 992, 2000, 100_000])
@pytest.mark.parametrize("head", ["{", '{"format": 2, "sha256": "ab", '])
def test_json_however_deep_is_refused_in_one_line(tmp_path: Path, depth: int, head: str) -> None:
    path = tmp_path / "deep.json"
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        path.write_text(f'{head}"x": {opening * depth}{"1" if closing == "}" else ""}{closing * depth}}}')
        with contextlib.suppress(BastionError):
            storage.read_json(path)

from __future__ import annotations

import os
import pickle
import resource
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_samples import python2_pickle, write_tar
from hypothesis import given
from hypothesis import strategies as st

from bastion.data.archive import read_members, unpickle
from bastion.errors import BastionError


class Evil:
    """What makes an ordinary unpickler run a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_runs_a_command_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    victim = tmp_path / "victim"
    content = pickle.dumps({"data": [Evil(f"touch {victim}")]}, protocol=protocol)
    with pytest.raises(BastionError, match=r"there: not a pickle of plain arrays: it asks for (posix|nt)\.system"):
        unpickle(content, "there")
    assert not victim.exists()
    pickle.loads(content)  # the same bytes do harm elsewhere: the test is not idle
    assert victim.exists()


@pytest.mark.parametrize("harmless", [OrderedDict(a=1), np.float64(1.0), np.random.default_rng(0), print])
def test_only_what_batches_need_is_known(harmless: Any) -> None:
    with pytest.raises(BastionError, match="it asks for"):
        unpickle(pickle.dumps(harmless, protocol=2), "there")


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_arrays_of_python_2_and_of_both_numpys_are_read(module: bytes) -> None:
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    content = python2_pickle({b"data": array, b"labels": [1, 2], b"name": b"batch"})
    content = content.replace(b"cnumpy.core.multiarray\n", b"c" + module + b"\n")
    assert module in content
    read = unpickle(content, "there")
    assert (read.pop(b"data") == array).all()
    assert read == {b"labels": [1, 2], b"name": b"batch"}


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_plain_values_or_our_own_error(content: bytes) -> None:
    with suppress(BastionError):
        assert type(unpickle(content, "there")).__module__ in ("builtins", "numpy")


def test_only_the_wanted_members_are_read(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar.gz", {"one": b"1", "../../two": b"2", "three": b"3"})
    assert read_members(path, {"one", "three", "four"}) == {"one": b"1", "three": b"3"}
    assert [item.name for item in tmp_path.iterdir()] == ["a.tar.gz"]


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_an_archive_cut_off_is_an_error(tmp_path: Path, kept: float) -> None:
    noise = np.random.default_rng(0).bytes(100_000)
    path = write_tar(tmp_path / "a.tar.gz", {"one": noise, "two": noise})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(BastionError, match=r"a\.tar\.gz: not a tar archive, or cut off"):
        read_members(path, {"one", "two"})


def test_no_archive_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BastionError, match=r"none\.tar\.gz: no such file"):
        read_members(tmp_path / "none.tar.gz", {"one"})


class Forged:
    """An array of objects over raw bytes: numpy would follow them as pointers."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return np.ndarray, ((1,), np.dtype("O"), b"\x01" * 8)


@pytest.mark.parametrize("value", [Forged(), np.array([1.5]), np.array([object()]), np.array(["a"])])
def test_arrays_of_anything_but_bytes_are_refused(value: object) -> None:
    with pytest.raises(BastionError, match="there: not a pickle of plain arrays"):
        unpickle(pickle.dumps({"data": value}), "there")


def test_arrays_of_bytes_come_back() -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 12)
    loaded = unpickle(pickle.dumps({"data": pixels, "labels": [3, 4]}), "there")
    assert np.array_equal(loaded["data"], pixels)
    assert loaded["labels"] == [3, 4]


def test_a_pickle_cannot_ask_for_more_memory_than_it_has_bytes() -> None:
    """An unpickler in C would make a table of four thousand million places for this one value."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert unpickle(b"\x80\x02K\x07r\xff\xff\xff\xff.", "there") == 7
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


def test_an_archive_of_more_than_any_data_set_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "a.tar.gz", {f"{number}": bytes(10_000) for number in range(9)})
    monkeypatch.setattr("bastion.data.archive._MOST_TOTAL", 50_000)
    with pytest.raises(BastionError, match="not a tar archive, or cut off .it holds more than 50,000 bytes"):
        read_members(path, {"8"})

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_samples import files_below, random_arrays

from bastion.data.acquire import Source, acquire, from_apt, from_npm, run
from bastion.data.arrays import ArrayData, digests
from bastion.data.download import part_of
from bastion.errors import BastionError
from bastion.storage import Arrays, read_arrays, write_arrays

RIGHT = random_arrays(20, 10)
WRONG = {**RIGHT, "test_labels": np.zeros(10, dtype=np.uint8)}
DATA = ArrayData("noise", tuple("abcdefghij"), (0.5,) * 3, (0.5,) * 3, pinned=digests(RIGHT))


def read(path: Path) -> Arrays:
    return read_arrays(path)[0]


def source(name: str, arrays: Arrays | None, log: list[str]) -> Source:
    """A place that has these arrays, or that cannot be reached."""

    def fetch(archive: Path) -> None:
        log.append(name)
        if arrays is None:
            part_of(archive).parent.mkdir(parents=True, exist_ok=True)
            part_of(archive).write_bytes(b"the beginning")
            raise BastionError("no route to host")
        write_arrays(archive, arrays)

    return Source(f"the {name} site", f"{name}.archive", fetch)


def test_the_first_source_that_works_is_stored_and_nothing_else_is_left(cache: Path) -> None:
    log: list[str] = []
    sources = [source("far", None, log), source("near", RIGHT, log), source("spare", RIGHT, log)]
    assert acquire(DATA, sources, read, None) == cache / "noise.safetensors"
    assert log == ["far", "near"]
    assert files_below(cache) == ["noise.safetensors"]
    assert DATA.intact()


def test_wrong_bytes_are_passed_over(cache: Path) -> None:
    log: list[str] = []
    acquire(DATA, [source("forged", WRONG, log), source("true", RIGHT, log)], read, None)
    assert log == ["forged", "true"]
    assert files_below(cache) == ["noise.safetensors"]


def test_when_all_fail_one_line_tells_what_was_tried_why_it_failed_and_what_to_do(cache: Path) -> None:
    log: list[str] = []
    with pytest.raises(BastionError) as error:
        acquire(DATA, [source("far", None, log), source("forged", WRONG, log)], read, None)
    message = str(error.value)
    assert message.startswith(
        "data set 'noise' could not be fetched (the far site: no route to host; "
        "the forged site: forged.archive: test_labels is not as published"
    )
    assert message.endswith("give it with `bastion data get noise --from PATH`")
    assert "\n" not in message
    assert files_below(cache) == ["downloads/far.archive.part"], "what can be resumed stays, what is wrong goes"


def test_an_archive_downloaded_before_is_used_first(cache: Path) -> None:
    log: list[str] = []
    write_arrays(cache / "downloads" / "second.archive", RIGHT)
    acquire(DATA, [source("first", RIGHT, log), source("second", RIGHT, log)], read, None)
    assert log == []
    assert files_below(cache) == ["noise.safetensors"]


def test_what_is_stored_already_is_not_fetched_again_unless_damaged(cache: Path) -> None:
    log: list[str] = []
    sources = [source("near", RIGHT, log)]
    path = acquire(DATA, sources, read, None)
    acquire(DATA, sources, read, None)
    assert log == ["near"]
    path.write_bytes(path.read_bytes()[:-1])
    acquire(DATA, sources, read, None)
    assert log == ["near", "near"]
    assert DATA.intact()


def test_a_given_file_wins_and_is_kept(cache: Path, tmp_path: Path) -> None:
    log: list[str] = []
    write_arrays(tmp_path / "mine", RIGHT)
    acquire(DATA, [source("near", RIGHT, log)], read, tmp_path / "mine")
    assert log == []
    assert (tmp_path / "mine").exists()
    assert DATA.intact()


def test_a_wrong_given_file_is_an_error_and_no_reason_to_go_elsewhere(cache: Path, tmp_path: Path) -> None:
    log: list[str] = []
    write_arrays(tmp_path / "mine", WRONG)
    with pytest.raises(BastionError, match="mine: test_labels is not as published"):
        acquire(DATA, [source("near", RIGHT, log)], read, tmp_path / "mine")
    assert log == []
    assert (tmp_path / "mine").exists()
    assert files_below(cache) == []


def test_a_full_disk_keeps_the_archive_for_the_next_call(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    sources = [source("near", RIGHT, log)]
    replace = os.replace

    def full_for_the_data_set(temporary: Any, path: Path) -> None:
        if path == DATA.path:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(temporary, path)

    with monkeypatch.context() as full:
        full.setattr(os, "replace", full_for_the_data_set)
        with pytest.raises(BastionError, match=r"noise\.safetensors: no space left on the disk"):
            acquire(DATA, sources, read, None)
    assert files_below(cache) == ["downloads/near.archive"]
    acquire(DATA, sources, read, None)
    assert log == ["near"]
    assert files_below(cache) == ["noise.safetensors"]


def test_a_folder_that_cannot_be_written_is_one_plain_error(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(BastionError, match="could not be fetched"):
        acquire(DATA, [source("near", RIGHT, [])], read, None)


def test_a_program_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(BastionError, match="`no-such-program --x`: no-such-program is not installed"):
        run(["no-such-program", "--x"], tmp_path)


def test_the_complaint_of_a_program_is_told(tmp_path: Path) -> None:
    with pytest.raises(BastionError, match=r"`sh -c .*`: first words$"):
        run(["sh", "-c", "echo first words >&2; echo more >&2; exit 3"], tmp_path)


def test_a_program_that_makes_no_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "npm").write_text("#!/bin/sh\n")
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(BastionError, match=r"`npm pack .* thing@1` made 0 files, expected one \*\.tgz"):
        from_npm("thing@1")(tmp_path / "downloads" / "thing.tgz")
    assert list((tmp_path / "downloads").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "fetch"), [("npm", from_npm("left-pad@1.3.0")), ("apt-get", from_apt("dataset-fashion-mnist"))]
)
def test_package_managers_fetch_a_package(tmp_path: Path, program: str, fetch: Callable[[Path], object]) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    fetch(tmp_path / "package")
    assert [item.name for item in tmp_path.iterdir()] == ["package"]
    assert (tmp_path / "package").stat().st_size > 1000

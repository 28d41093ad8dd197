"""Another picture under the same name, of the same size in bytes, is other data."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bastion import BastionError
from bastion.data import cache_folder, contents
from bastion.data.contents import contents_digest
from bastion.data.imagefolder import imagefolder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BASTION_DATA", str(tmp_path / "cache"))
    (tmp_path / "pictures").mkdir()
    for name in "ab":
        (tmp_path / "pictures" / name).write_bytes(name.encode() * 100)
    return tmp_path / "pictures"


def test_a_digest_changes_with_a_file_of_the_same_size(folder: Path) -> None:
    before = contents_digest(folder, ["a", "b"])
    assert contents_digest(folder, ["a", "b"]) == before
    (folder / "b").write_bytes(b"c" * 100)
    assert contents_digest(folder, ["a", "b"]) != before
    (folder / "b").write_bytes(b"b" * 100)
    assert contents_digest(folder, ["a", "b"]) == before
    assert contents_digest(folder, ["b", "a"]) != before


def test_an_old_time_does_not_hide_another_file(folder: Path) -> None:
    """As `cp -p` or `rsync -t` may leave it."""
    before, times = contents_digest(folder, ["a"]), (folder / "a").stat()
    (folder / "new").write_bytes(b"x" * 100)
    os.utime(folder / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
    (folder / "new").replace(folder / "a")
    assert (folder / "a").stat().st_mtime_ns == times.st_mtime_ns
    assert contents_digest(folder, ["a"]) != before


def test_a_file_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = contents_digest(folder, ["a", "b"])
    monkeypatch.setattr(contents.hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    assert contents_digest(folder, ["a", "b"]) == first


def test_a_damaged_or_missing_cache_costs_time_only(folder: Path) -> None:
    before = contents_digest(folder, ["a", "b"])
    (path,) = (cache_folder() / "contents").iterdir()
    path.write_text(path.read_text().replace("sha256", "sha255"))
    assert contents_digest(folder, ["a", "b"]) == before


def test_a_file_that_is_gone_is_named(folder: Path) -> None:
    with pytest.raises(BastionError, match="none: no such file"):
        contents_digest(folder, ["none"])


def test_a_folder_of_pictures_has_the_digest_of_its_pixels(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
            for number in range(2):
                pixels = np.full((8, 8, 3), 10 * number, np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{number}.bmp")
    before = imagefolder(str(root), size=8)
    digests = before.train.digest(), before.test.digest()
    Image.fromarray(np.full((8, 8, 3), 200, np.uint8)).save(root / "val" / "cat" / "0.bmp")
    after = imagefolder(str(root), size=8)
    assert after.fingerprint == before.fingerprint  # the same paths and sizes
    assert after.train.digest() == digests[0]
    assert after.test.digest() != digests[1]

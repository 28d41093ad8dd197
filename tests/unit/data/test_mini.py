from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import bastion.data.mini as mini
from bastion.data import datasets
from bastion.data.cifar import CIFAR10
from bastion.errors import BastionError

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_cifar10_mini.py"
needs_cifar10 = pytest.mark.skipif(not CIFAR10.path.exists(), reason="cifar10 is not in the cache")


def test_it_is_there_without_a_cache_and_balanced(cache: Path) -> None:
    data = datasets.build("cifar10-mini")
    assert (len(data.train), len(data.val), len(data.test)) == (3600, 400, 1000)
    assert data.train.labels.bincount().tolist() == [360] * 10
    assert data.val.labels.bincount().tolist() == [40] * 10
    assert data.test.labels.bincount().tolist() == [100] * 10
    assert sorted([*data.train.index.tolist(), *data.val.index.tolist()]) == list(range(4000))
    assert torch.equal(data.test.index, torch.arange(1000))
    assert not cache.exists()


def test_it_is_in_the_original_order_and_not_by_class() -> None:
    """CIFAR-10's first test images are a cat, two ships, an airplane and two frogs."""
    assert mini.decode()["test_labels"][:6].tolist() == [3, 8, 8, 0, 6, 6]


def test_it_is_decoded_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    first = datasets.build("cifar10-mini")
    monkeypatch.setattr(mini, "decode", lambda: pytest.fail("again"))
    assert torch.equal(datasets.build("cifar10-mini").test.batch([7]).x, first.test.batch([7]).x)


def test_it_stays_small() -> None:
    assert sum(path.stat().st_size for path in (mini.MOSAIC, mini.LABELS)) < 12e6


def test_a_damaged_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = mini.LABELS.read_text()
    (tmp_path / "labels").write_text(("1" if labels[0] == "0" else "0") + labels[1:])
    monkeypatch.setattr(mini, "LABELS", tmp_path / "labels")
    with pytest.raises(BastionError, match="train_labels is not as published"):
        mini.decode()
    (tmp_path / "labels").write_text("0123")
    with pytest.raises(BastionError, match="install bastion again"):
        mini.decode()


@needs_cifar10
def test_it_is_the_first_images_of_each_class_of_cifar10() -> None:
    whole, small = CIFAR10.read(), mini.decode()
    for split, count in (("train", 400), ("test", 100)):
        for label in range(10):
            first = whole[f"{split}_images"][whole[f"{split}_labels"] == label][:count]
            assert np.array_equal(small[f"{split}_images"][small[f"{split}_labels"] == label], first)


@pytest.mark.slow
@needs_cifar10
def test_the_script_makes_the_embedded_files_again_bit_for_bit() -> None:
    result = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("the same") == 2

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_samples import files_below, random_arrays

from bastion.data.arrays import PARTS, ArrayData, ArraySplit, digests, verify
from bastion.errors import BastionError
from bastion.storage import Arrays

ARRAYS = random_arrays(200, 30)


def described(arrays: Arrays, *, pinned: bool = True, classes: int = 10) -> ArrayData:
    names = tuple(f"class {number}" for number in range(classes))
    pins = digests(arrays) if pinned else {}
    return ArrayData(name="noise", classes=names, mean=(0.5,) * 3, std=(0.25,) * 3, pinned=pins)


def test_a_batch_has_the_pixels_over_255_in_nchw() -> None:
    split = ArraySplit(ARRAYS["train_images"], ARRAYS["train_labels"])
    batch = split.batch([7, 3, 7])
    assert batch.x.dtype == torch.float32
    assert batch.x.is_contiguous()
    assert batch.x.shape == (3, 3, 32, 32)
    assert batch.x[1, 2, 5, 9] == torch.tensor(ARRAYS["train_images"][3, 5, 9, 2] / np.float32(255))
    assert batch.index.tolist() == [7, 3, 7]
    assert batch.y.tolist() == [7, 3, 7]
    assert batch.y.dtype == batch.index.dtype == torch.int64
    assert torch.equal((batch.x * 255).round().byte()[0].permute(1, 2, 0), torch.tensor(ARRAYS["train_images"][7]))


def test_the_image_is_the_stored_one() -> None:
    split = ArraySplit(ARRAYS["train_images"], ARRAYS["train_labels"])
    assert split.image(4).mode == "RGB"
    assert (np.asarray(split.image(4)) == ARRAYS["train_images"][4]).all()


def test_one_channel_is_a_grey_image() -> None:
    grey = random_arrays(5, 5, shape=(28, 28, 1))
    split = ArraySplit(grey["train_images"], grey["train_labels"])
    assert split.batch([2]).x.shape == (1, 1, 28, 28)
    assert split.image(2).mode == "L"
    assert (np.asarray(split.image(2)) == grey["train_images"][2, :, :, 0]).all()


def test_indices_stay_with_the_examples_through_subsets() -> None:
    split = ArraySplit(ARRAYS["train_images"], ARRAYS["train_labels"])
    nested = split.subset(range(50, 100)).subset([1, 0, 49])
    assert nested.index.tolist() == [51, 50, 99]
    assert nested.labels.tolist() == [1, 0, 9]
    assert torch.equal(nested.batch([2]).x, split.batch([99]).x)
    assert (np.asarray(nested.image(0)) == ARRAYS["train_images"][51]).all()


def test_nothing_is_a_batch_too() -> None:
    assert ArraySplit(ARRAYS["test_images"], ARRAYS["test_labels"]).batch([]).x.shape == (0, 3, 32, 32)


def test_what_is_stored_is_read_back(cache: Path) -> None:
    data = described(ARRAYS)
    assert data.store(ARRAYS, "here") == cache / "noise.safetensors"
    read = data.read()
    assert all((read[part] == ARRAYS[part]).all() for part in PARTS)
    assert data.verify() == digests(ARRAYS)


def test_the_splits_are_disjoint_and_keep_the_official_numbers() -> None:
    data = described(ARRAYS).data_set(ARRAYS)
    assert (len(data.train), len(data.val), len(data.test)) == (180, 20, 30)
    assert sorted([*data.train.index.tolist(), *data.val.index.tolist()]) == list(range(200))
    assert torch.equal(data.val.labels, torch.from_numpy(ARRAYS["train_labels"]).long()[data.val.index])
    assert data.shape == (3, 32, 32)


@pytest.mark.parametrize("part", PARTS)
def test_one_changed_value_is_another_fingerprint(part: str) -> None:
    changed = {name: array.copy() for name, array in ARRAYS.items()}
    changed[part].flat[0] = (changed[part].flat[0] + 1) % 10
    before = described(ARRAYS, pinned=False).data_set(ARRAYS).fingerprint
    assert described(ARRAYS, pinned=False).data_set(changed).fingerprint != before
    assert described(ARRAYS).data_set(ARRAYS).fingerprint == before


@pytest.mark.parametrize("part", PARTS)
def test_wrong_arrays_are_refused_and_leave_no_file(cache: Path, part: str) -> None:
    changed = {name: array.copy() for name, array in ARRAYS.items()}
    changed[part].flat[0] = (changed[part].flat[0] + 1) % 10
    with pytest.raises(BastionError, match=f"somewhere: {part} is not as published"):
        described(ARRAYS).store(changed, "somewhere")
    assert files_below(cache) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"train_images": ARRAYS["train_images"].astype(np.float32)},
        {"train_images": ARRAYS["train_images"][..., 0]},
        {"test_labels": ARRAYS["test_labels"][1:]},
        {"test_labels": ARRAYS["test_labels"] + np.uint8(1)},
    ],
    ids=["dtype", "dimensions", "length", "label out of range"],
)
def test_arrays_of_the_wrong_form_are_refused(cache: Path, wrong: Arrays) -> None:
    split = next(iter(wrong)).partition("_")[0]
    with pytest.raises(BastionError, match=f"here: {split} must be uint8 images .* and N uint8 labels below 10"):
        described(ARRAYS, pinned=False).store({**ARRAYS, **wrong}, "here")
    assert files_below(cache) == []


@pytest.mark.parametrize("pinned", [True, False])
def test_a_flipped_bit_in_the_stored_file_is_found_at_the_next_read(cache: Path, pinned: bool) -> None:
    data = described(ARRAYS, pinned=pinned)
    path = data.store(ARRAYS, "here")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        BastionError, match=r"(not as published|corrupt).*damaged: `bastion data get noise` replaces it"
    ):
        data.read()
    assert not data.intact()


def test_a_file_cut_short_is_found_at_the_next_read(cache: Path) -> None:
    data = described(ARRAYS)
    path = data.store(ARRAYS, "here")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BastionError, match=r"noise\.safetensors.*`bastion data get noise` replaces it"):
        data.read()


def test_a_missing_data_set_tells_how_to_get_it(cache: Path) -> None:
    with pytest.raises(BastionError) as error:
        described(ARRAYS).read()
    assert str(error.value) == f"data set 'noise' is not in {cache}; get it with `bastion data get noise`"


def test_a_full_disk_leaves_the_old_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = described(ARRAYS, pinned=False)
    before = data.store(ARRAYS, "here").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BastionError, match="no space left on the disk"):
        data.store(random_arrays(10, 10), "here")
    assert data.path.read_bytes() == before
    assert files_below(cache) == ["noise.safetensors"]


def test_verify_knows_what_can_be_verified(cache: Path) -> None:
    assert sorted(verify("cifar10-mini")) == sorted(PARTS)
    with pytest.raises(BastionError, match="data set 'cifar10' is not in"):
        verify("cifar10")
    with pytest.raises(BastionError, match="'imagefolder' stores nothing to verify; these do: cifar10, "):
        verify("imagefolder")
    with pytest.raises(BastionError, match="unknown data set 'cifar11'; did you mean 'cifar10'"):
        verify("cifar11")

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from data_samples import random_data_set

from bastion.corruptions import corrupt
from bastion.data import datasets
from bastion.data.corrupted import corrupted
from bastion.errors import BastionError
from bastion.recipe import named_data
from bastion.types import DataSet


def _data(**settings: object) -> DataSet:
    return datasets.build({"name": "cifar10-mini", **settings})


def test_every_data_set_takes_a_corruption() -> None:
    clean, foggy = _data(), _data(corruption="fog", severity=3)
    batch = clean.test.batch([5, 9])
    made = foggy.test.batch([5, 9])
    assert torch.equal(made.x, corrupt(batch.x, "fog", 3, index=batch.index))
    assert torch.equal(made.y, batch.y) and torch.equal(made.index, batch.index)
    assert (foggy.classes, foggy.shape) == (clean.classes, clean.shape)


def test_corrupted_images_have_another_name_than_the_data_set() -> None:
    assert _data().name == "cifar10-mini"
    name = _data(corruption="fog", severity=3).name
    assert name == "cifar10-mini:corruption=fog,severity=3"
    assert datasets.build(named_data(name)).test.digest() == _data(corruption="fog", severity=3).test.digest()
    assert _data(corruption="fog", severity=3, jpeg85=True).name == f"{name},jpeg85=true"


def test_a_picture_is_the_corrupted_one() -> None:
    foggy = _data(corruption="fog", severity=3)
    pixels = torch.from_numpy(np.array(foggy.test.image(4))).permute(2, 0, 1)
    assert torch.equal(pixels.float() / 255, foggy.test.batch([4]).x[0])


def test_a_subset_keeps_examples_and_their_corruption() -> None:
    data = _data(corruption="gaussian_noise", severity=5)
    part = data.test.subset([7, 2])
    assert torch.equal(part.batch([1]).x, data.test.batch([2]).x)


def test_fingerprint_and_digest_tell_corruptions_apart() -> None:
    variants = [
        {},
        {"corruption": "fog", "severity": 3},
        {"corruption": "fog", "severity": 4},
        {"corruption": "snow", "severity": 3},
        {"corruption": "fog", "severity": 3, "jpeg85": True},
    ]
    made = [_data(**settings) for settings in variants]
    assert len({data.fingerprint for data in made}) == len({data.test.digest() for data in made}) == len(variants)
    assert _data(**variants[1]).fingerprint == made[1].fingerprint
    assert pickle.loads(pickle.dumps(made[1])).test.digest() == made[1].test.digest()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"corruption": "fogg", "severity": 3}, "unknown corruption 'fogg'; did you mean 'fog'"),
        ({"corruption": "fog"}, "fog needs a `severity` from 1 to 5"),
        ({"corruption": "fog", "severity": 7}, "severity must be 1, 2, 3, 4 or 5, got 7"),
        ({"severity": 3}, "go with a `corruption`"),
        ({"corruptoin": "fog"}, "corruptoin.*did you mean 'corruption'"),
    ],
)
def test_mistakes_are_told_with_their_place(settings: dict[str, object], message: str) -> None:
    with pytest.raises(BastionError, match=message):
        datasets.build({"name": "cifar10-mini", **settings}, "data")


def test_frost_needs_its_photographs_when_the_data_set_is_made(tmp_path: Path) -> None:
    with pytest.raises(BastionError, match="frost_proc"):
        corrupted(random_data_set(), corruption="frost", severity=1, textures=str(tmp_path))

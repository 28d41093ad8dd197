"""What is known of data sets without their files is what their files would say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bastion.data import datasets
from bastion.data.known import SIZES, Size, outline
from bastion.data.split import train_val_split
from bastion.errors import BastionError


@pytest.mark.parametrize("name", SIZES)
def test_what_is_known_is_registered(name: str) -> None:
    datasets.check({"name": name})
    assert outline({"name": name}).name == name


@pytest.mark.parametrize("name", [name for name, facts in SIZES.items() if facts.train < 100_000])
def test_lengths_are_those_of_the_real_split(name: str) -> None:
    facts = SIZES[name]
    data = outline({"name": name})
    train, val = train_val_split(torch.arange(facts.train) % facts.classes)
    # Imagenette's classes are nearly of one size
    assert len(data.val) == pytest.approx(len(val), abs=1 if name == "imagenette" else 0)
    assert len(data.train) == pytest.approx(len(train), abs=1 if name == "imagenette" else 0)
    assert len(data.train) + len(data.val) == facts.train
    assert (len(data.test), len(data.classes)) == (facts.test, facts.classes)


def test_imagenet_is_as_published() -> None:
    data = outline({"name": "imagenet"})
    assert SIZES["imagenet"] == Size(1_281_167, 50_000, 1000, (3, 224, 224))
    assert len(data.train) == 1_281_167 - 100_000  # at most 100 of a class are held out


def test_the_size_is_the_recipes() -> None:
    assert outline({"name": "imagenette", "size": 160}).shape == (3, 160, 160)
    assert outline({"name": "fashion-mnist"}).shape == (1, 28, 28)


@pytest.mark.skipif(not Path("~/.cache/bastion/fashion-mnist.safetensors").expanduser().exists(), reason="not here")
def test_the_outline_has_the_lengths_of_the_data_set_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BASTION_DATA", raising=False)
    real, known = datasets.build("fashion-mnist"), outline({"name": "fashion-mnist"})
    for part in ("train", "val", "test"):
        assert len(getattr(real, part)) == len(getattr(known, part))
    assert (real.shape, len(real.classes)) == (known.shape, len(known.classes))


def test_nobody_can_look_at_an_outline() -> None:
    split = outline({"name": "imagenet"}).train.subset(range(10))
    assert len(split) == len(split.index) == len(split.labels) == 10
    for look in (split.image, lambda position: split.batch([position])):
        with pytest.raises(BastionError, match="data set 'imagenet': this is its outline, without pictures"):
            look(0)


def test_of_other_data_sets_nothing_is_known() -> None:
    with pytest.raises(BastionError, match=r"nothing is known of the data set 'imagnet' .*; did you mean 'imagenet'\?"):
        outline({"name": "imagnet"})

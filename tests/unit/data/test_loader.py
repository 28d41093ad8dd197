"""The batches of a step are the same whatever came before and however many processes load them."""

from __future__ import annotations

import pytest
import torch

from bastion import BastionError
from bastion.data.augment import TrainingTransform
from bastion.data.loader import steps_per_epoch, training_batches
from bastion.recipe import Augment
from bastion.types import Batch, DataSet


def _batches(data: DataSet, start: int = 0, stop: int = 6, workers: int = 0, seed: int = 0) -> list[Batch]:
    transform = TrainingTransform(Augment(), data)
    return list(training_batches(data.train, transform, batch=16, seed=seed, start=start, stop=stop, workers=workers))


def _equal(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(p, q) for x, y in zip(a, b, strict=True) for p, q in zip(x, y, strict=True)
    )


def test_an_epoch_shows_every_image_once_and_each_epoch_in_another_order(tiny_data: DataSet) -> None:
    batches = _batches(tiny_data)
    first, second = (torch.cat([b.index for b in batches[i : i + 3]]) for i in (0, 3))
    assert sorted(first.tolist()) == sorted(second.tolist()) == sorted(tiny_data.train.index.tolist())
    assert not torch.equal(first, second)
    assert torch.equal(torch.cat([b.y for b in batches[:3]]), first % 3)


def test_starting_later_gives_the_same_batches(tiny_data: DataSet) -> None:
    whole = _batches(tiny_data)
    assert _equal(_batches(tiny_data, start=2), whole[2:])
    assert _equal(_batches(tiny_data, start=5), whole[5:])


def test_worker_processes_change_nothing(tiny_data: DataSet) -> None:
    assert _equal(_batches(tiny_data, workers=2), _batches(tiny_data))


def test_the_global_generators_have_no_part_in_it(tiny_data: DataSet) -> None:
    torch.manual_seed(1)
    first = _batches(tiny_data)
    torch.manual_seed(2)
    assert _equal(_batches(tiny_data), first)
    assert not _equal(_batches(tiny_data, seed=1), first)


def test_an_image_is_augmented_anew_in_each_epoch(tiny_data: DataSet) -> None:
    batches = _batches(tiny_data)
    images = [torch.cat([b.x[b.index == 7] for b in batches[i : i + 3]]) for i in (0, 3)]
    assert not torch.equal(*images)


def test_a_batch_larger_than_the_data_is_an_error(tiny_data: DataSet) -> None:
    with pytest.raises(BastionError, match="batch: 64 is more than the 48 training images"):
        steps_per_epoch(tiny_data.train, 64)
    assert steps_per_epoch(tiny_data.train, 13) == 3

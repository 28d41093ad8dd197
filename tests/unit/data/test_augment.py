"""Augmentation is timm's, stays in [0, 1], and is a function of its seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bastion import BastionError, rng
from bastion.data.augment import TrainingTransform, mixing
from bastion.recipe import Augment
from bastion.types import Batch, DataSet

ALL = Augment(crop="resized", color_jitter=0.4, auto_augment="rand-m9-mstd0.5-inc1", erasing=1.0)


def _draw(data: DataSet, augment: Augment, seed: int, position: int = 0) -> torch.Tensor:
    with rng.preserved():
        rng.reseed("test", seed)
        return TrainingTransform(augment, data)(data.train.image(position))


def test_without_augmentation_a_training_image_is_the_measured_one(tiny_data: DataSet) -> None:
    plain = Augment(crop="none", hflip=0.0)
    assert torch.equal(_draw(tiny_data, plain, 0, 5), tiny_data.train.batch([5]).x[0])


def test_padding_shifts_and_flipping_mirrors(tiny_data: DataSet) -> None:
    original = tiny_data.train.batch([5]).x[0]
    assert torch.equal(_draw(tiny_data, Augment(crop="none", hflip=1.0), 0, 5), original.flip(-1))
    shifted = _draw(tiny_data, Augment(crop="pad", padding=2, hflip=0.0), 3, 5)
    padded = torch.nn.functional.pad(original, (2, 2, 2, 2))
    windows = padded.unfold(1, 8, 1).unfold(2, 8, 1)  # (C, 5, 5, 8, 8)
    assert (windows == shifted[:, None, None]).all(dim=(0, 3, 4)).sum() >= 1


@pytest.mark.parametrize("augment", [Augment(), Augment(crop="resized"), ALL], ids=["pad", "resized", "all"])
def test_pixels_stay_in_range_and_the_seed_decides(tiny_data: DataSet, augment: Augment) -> None:
    first = [_draw(tiny_data, augment, seed) for seed in range(12)]
    assert all(x.shape == (3, 8, 8) and x.dtype == torch.float32 and x.min() >= 0 and x.max() <= 1 for x in first)
    assert all(torch.equal(_draw(tiny_data, augment, seed), x) for seed, x in enumerate(first))
    assert len({x.numpy().tobytes() for x in first}) > 6


def test_erasing_fills_with_noise_of_the_data_and_leaves_the_rest(tiny_data: DataSet) -> None:
    original = tiny_data.train.batch([0]).x[0]
    changed = torch.stack(
        [_draw(tiny_data, Augment(crop="none", hflip=0, erasing=1.0), s) != original for s in range(200)]
    )
    areas = changed.any(1).float().mean(dim=(1, 2))
    assert 0.0 < areas.mean() < 0.34
    values = torch.cat(
        [_draw(tiny_data, Augment(crop="none", hflip=0, erasing=1.0), s)[c] for s, c in enumerate(changed)]
    )
    assert abs(values.mean() - 0.4) < 0.02  # the data set's mean
    assert abs(values.std() - 0.2) < 0.03


def test_pictures_of_other_sizes_are_fitted(tiny_data: DataSet) -> None:
    from PIL import Image

    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8))
    for crop in ("pad", "none", "resized"):
        assert TrainingTransform(Augment(crop=crop), tiny_data)(picture).shape == (3, 8, 8)


def test_mixing_makes_soft_labels_that_sum_to_one(tiny_data: DataSet) -> None:
    batch = tiny_data.train.batch(range(8))
    with rng.preserved():
        rng.reseed("mix")
        mixed = mixing(Augment(mixup=0.8, cutmix=1.0), 3, 8)(batch)
    assert mixed.y.shape == (8, 3)
    assert torch.allclose(mixed.y.sum(1), torch.ones(8))
    assert not torch.equal(mixed.x, batch.x)
    assert torch.equal(batch.x, tiny_data.train.batch(range(8)).x)  # the batch itself is left alone
    mixed.check(3, "here")


def test_mixup_is_the_convex_combination_of_its_labels(tiny_data: DataSet) -> None:
    batch = Batch(torch.arange(2), torch.stack([torch.zeros(3, 8, 8), torch.ones(3, 8, 8)]), torch.tensor([0, 1]))
    with rng.preserved():
        rng.reseed("mix")
        mixed = mixing(Augment(mixup=1.0), 3, 2)(batch)
    assert torch.allclose(mixed.x.mean(dim=(1, 2, 3)), mixed.y[:, 1])


def test_mixing_needs_an_even_batch() -> None:
    with pytest.raises(BastionError, match="its size must be even, got 7"):
        mixing(Augment(mixup=0.8), 3, 7)

"""Augmentation is timm's, stays in [0, 1], and is a function of its seed."""

from __future__ import annotations

import bastion._torchvision  # noqa: F401  (before timm)

# isort: split
import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment

from bastion import BastionError, rng
from bastion.data.augment import ABRUPT, REVERSED, TrainingTransform, mixing, posterize, strength
from bastion.recipe import Augment
from bastion.types import Batch, DataSet

ALL = Augment(crop="resized", color_jitter=0.4, auto_augment="rand-m9-mstd0.5-inc1", erasing=1.0)


def _draw(data: DataSet, augment: Augment, seed: int, position: int = 0, epoch: int = 0) -> torch.Tensor:
    with rng.preserved():
        rng.reseed("test", seed)
        return TrainingTransform(augment, data)(data.train.image(position), epoch)


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


def test_the_policy_of_cifar_is_applied_to_the_picture_and_fills_with_the_mean(tiny_data: DataSet) -> None:
    augment = Augment(crop="none", hflip=0.0, auto_augment="cifar10", color_jitter=0.4)
    drawn = [_draw(tiny_data, augment, seed) for seed in range(200)]
    original = tiny_data.train.batch([0]).x[0]
    changed = [x for x in drawn if not torch.equal(x, original)]
    assert len(changed) > 100 and len({x.numpy().tobytes() for x in changed}) > 40
    assert any(torch.equal(x, original) for x in drawn)  # no jitter beside a policy
    grey = torch.full((3,), round(255 * 0.4) / 255)
    moved = [x for x in changed if torch.equal(x[:, 0, 0], grey) or torch.equal(x[:, -1, -1], grey)]
    assert len(moved) > 10  # by TranslateX, TranslateY, ShearY or Rotate, which 7 of its 25 pairs have


def test_the_policy_of_cifar_cannot_grow(tiny_data: DataSet) -> None:
    with pytest.raises(BastionError, match="the policy 'cifar10' has no magnitude that could grow"):
        TrainingTransform(Augment(auto_augment="cifar10", progressive=2), tiny_data)


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
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8))
    for crop in ("pad", "none", "resized"):
        assert TrainingTransform(Augment(crop=crop), tiny_data)(picture, 0).shape == (3, 8, 8)


def test_mixing_makes_soft_labels_that_sum_to_one(tiny_data: DataSet) -> None:
    batch = tiny_data.train.batch(range(8))
    with rng.preserved():
        rng.reseed("mix")
        mixed = mixing(Augment(mixup=0.8, cutmix=1.0), 3, 8)(batch, 0)
    assert mixed.y.shape == (8, 3)
    assert torch.allclose(mixed.y.sum(1), torch.ones(8))
    assert not torch.equal(mixed.x, batch.x)
    assert torch.equal(batch.x, tiny_data.train.batch(range(8)).x)  # the batch itself is left alone
    mixed.check(3, "here")


def test_mixup_is_the_convex_combination_of_its_labels(tiny_data: DataSet) -> None:
    batch = Batch(torch.arange(2), torch.stack([torch.zeros(3, 8, 8), torch.ones(3, 8, 8)]), torch.tensor([0, 1]))
    with rng.preserved():
        rng.reseed("mix")
        mixed = mixing(Augment(mixup=1.0), 3, 2)(batch, 0)
    assert torch.allclose(mixed.x.mean(dim=(1, 2, 3)), mixed.y[:, 1])


def test_mixing_needs_an_even_batch() -> None:
    with pytest.raises(BastionError, match="its size must be even, got 7"):
        mixing(Augment(mixup=0.8), 3, 7)


@pytest.mark.parametrize("policy", ["rand-m10-inc1", "rand-m9-mstd0.5-inc1", "rand-m1", "v0", "augmix-m10-mstd1"])
def test_policies_that_keep_no_bits_of_an_image_make_it_black(tiny_data: DataSet, policy: str) -> None:
    """As with older Pillows; newer ones raise an error instead."""
    transform = TrainingTransform(Augment(auto_augment=policy), tiny_data)
    (step,) = (step for step in transform.chain(0).steps if type(step).__module__ == auto_augment.__name__)
    operations = getattr(step, "ops", None) or [operation for pair in step.policy for operation in pair]
    image, seen = tiny_data.train.image(0), set()
    for operation in (operation for operation in operations if operation.name.startswith("Posterize")):
        for magnitude in (0, 3, 6, 10):
            operation.prob, operation.magnitude, operation.magnitude_std = 1.0, magnitude, 0
            (bits,) = operation.level_fn(magnitude, {})
            expected = np.asarray(image) & (0x100 - (1 << (8 - bits)))
            assert np.array_equal(np.asarray(operation(image)), expected)
            seen.add(bits)
    assert seen == ({0, 1, 2, 4} if policy in ("rand-m1", "v0") else {4, 3, 2, 0})


@pytest.mark.parametrize(
    ("progressive", "expected"),
    [(0, [1, 1, 1, 1]), (1, [0, 1, 1, 1]), (2, [0, 0.5, 1, 1]), (2.5, [0, 0.4, 0.8, 1]), (0.5, [0, 1, 1, 1])],
)
def test_strength_grows_linearly_with_the_epochs(progressive: float, expected: list[float]) -> None:
    assert [strength(Augment(progressive=progressive), epoch) for epoch in range(4)] == pytest.approx(expected)


class TestProgressive:
    @pytest.mark.parametrize("crop", ["pad", "resized"])
    def test_it_starts_with_crop_and_flip_and_ends_with_all(self, tiny_data: DataSet, crop: str) -> None:
        """To the bit: the same draws decide on crop and flip."""
        full = Augment(crop=crop, color_jitter=0.4, auto_augment="rand-m9-mstd0.5-inc1", erasing=1.0)
        growing = full.model_copy(update={"progressive": 4.0})
        for seed in range(8):
            start = _draw(tiny_data, growing, seed)
            assert torch.equal(start, _draw(tiny_data, Augment(crop=crop), seed))
            for epoch in (4, 5, 100):
                assert torch.equal(_draw(tiny_data, growing, seed, epoch=epoch), _draw(tiny_data, full, seed))
            assert not torch.equal(start, _draw(tiny_data, full, seed))

    @pytest.mark.parametrize("epoch", [1, 2, 3])
    def test_in_between_each_part_has_its_strength(self, tiny_data: DataSet, epoch: int) -> None:
        """Jitter of a part of the strength is jitter with a part of the factor; for the policy see below."""
        growing = Augment(color_jitter=0.4, progressive=4)
        for seed in range(4):
            plain = _draw(tiny_data, Augment(color_jitter=0.4 * epoch / 4), seed)
            assert torch.equal(_draw(tiny_data, growing, seed, epoch=epoch), plain)

    def test_erasing_comes_as_often_as_the_strength_says(self, tiny_data: DataSet) -> None:
        growing = Augment(crop="none", hflip=0, erasing=0.8, progressive=2)
        original = tiny_data.train.batch([0]).x[0]
        for epoch, expected in ((0, 0.0), (1, 0.4), (2, 0.8)):
            erased = [not torch.equal(_draw(tiny_data, growing, s, epoch=epoch), original) for s in range(400)]
            assert abs(np.mean(erased) - expected) < 4 * (expected * (1 - expected) / 400) ** 0.5 + 1e-9

    def test_the_policy_has_a_part_of_its_magnitude(self, tiny_data: DataSet) -> None:
        """Half of `rand-m8` is `rand-m4`, but for what is felt at magnitude 0: that comes half as often too."""
        growing = TrainingTransform(Augment(auto_augment="rand-m8-p0.6-mstd0.5-inc1", progressive=2), tiny_data)
        (policy,) = (step for step in growing.chain(1).steps if isinstance(step, auto_augment.RandAugment))
        assert {operation.magnitude for operation in policy.ops} == {4.0}
        for operation in policy.ops:
            assert operation.prob == pytest.approx(0.3 if operation.name in ABRUPT else 0.6)
            assert operation.magnitude_std == 0.5

    def test_what_is_felt_at_magnitude_0_and_what_grows_backwards_is_known(self) -> None:
        """Of all operations that timm's policies are made of, asked at magnitudes 0 and 1."""
        noise = np.random.default_rng(0).integers(0, 200, (32, 32, 3), dtype=np.uint8)
        names = {*auto_augment._RAND_TRANSFORMS, *auto_augment._RAND_INCREASING_TRANSFORMS}
        names |= {*auto_augment._RAND_3A, *auto_augment._RAND_WEIGHTED_3A, *auto_augment._RAND_WEIGHTED_0}

        def change(name: str, magnitude: float) -> float:
            operation = auto_augment.AugmentOp(name, prob=1.0, magnitude=magnitude)
            operation.aug_fn = posterize if "Posterize" in name else operation.aug_fn
            changed = np.asarray(operation(Image.fromarray(noise)), dtype=float)
            return float(np.abs(changed - noise).mean())

        felt = {name for name in names if change(name, 0) > 0}
        assert felt - REVERSED == ABRUPT
        assert {name for name in names if change(name, 4) < change(name, 0)} == REVERSED & names

    @pytest.mark.parametrize("policy", ["augmix", "augmix-m5-w4-d2", "v0", "original-mstd0.5", "3a"])
    def test_a_policy_without_a_magnitude_is_an_error(self, tiny_data: DataSet, policy: str) -> None:
        TrainingTransform(Augment(auto_augment=policy), tiny_data)
        with pytest.raises(BastionError, match=f"progressive: the policy '{policy}' has no magnitude that could grow"):
            TrainingTransform(Augment(auto_augment=policy, progressive=0.5), tiny_data)

    def test_a_policy_that_grows_backwards_is_an_error(self, tiny_data: DataSet) -> None:
        with pytest.raises(BastionError, match="in 'rand-m9' Posterize is stronger with a smaller .*; add -inc1"):
            TrainingTransform(Augment(auto_augment="rand-m9", progressive=3), tiny_data)
        for policy in ("rand-m9-inc1", "rand-m9-tweights", "rand-m9-t3a"):
            TrainingTransform(Augment(auto_augment=policy, progressive=3), tiny_data)

    def test_batches_are_mixed_as_often_as_the_strength_says(self, tiny_data: DataSet) -> None:
        mix = mixing(Augment(mixup=0.8, cutmix=1.0, mix_prob=0.8, progressive=2), 3, 8)
        batch = tiny_data.train.batch(range(8))
        for epoch, expected in ((0, 0.0), (1, 0.4), (2, 0.8), (9, 0.8)):
            with rng.preserved():
                rng.reseed("mix", epoch)
                mixed = [mix(batch, epoch) for _ in range(400)]
            assert all(each.y.shape == (8, 3) for each in mixed)
            often = np.mean([not torch.equal(each.x, batch.x) for each in mixed])
            assert abs(often - expected) < 4 * (expected * (1 - expected) / 400) ** 0.5 + 1e-9

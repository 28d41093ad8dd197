"""The batches of a step are the same whatever came before and however many processes load them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from PIL.Image import Image
from torch import Tensor

from bastion import BastionError, rng
from bastion.data.arrays import ArraySplit
from bastion.data.augment import TrainingTransform, mixing
from bastion.data.loader import batch_layout, training_batches
from bastion.data.pool import Pool
from bastion.recipe import Augment, Patchwise
from bastion.types import Batch, DataSet

EXTRA, COPY = 1 << 32, 1 << 48  # what indices of extra images, and of copies, begin with
PLAIN = Augment()
PATCHWISE = Patchwise(size=2, prob=0.8, crop=0.5, noise=0.5, hflip=0.5)


def _noise(count: int, side: int = 8) -> ArraySplit:
    """More images of the three classes of `tiny_data`."""
    pictures = np.random.default_rng(1).integers(0, 255, (count, side, side, 3), dtype=np.uint8)
    return ArraySplit(pictures, np.arange(count, dtype=np.uint8) % 3)


def _pools(data: DataSet) -> dict[str, tuple[Pool, int]]:
    """A pool and the number of copies: every way in which a batch can be made up."""
    return {
        "plain": (Pool(data.train), 1),
        "repeats": (Pool(data.train), 4),
        "uneven": (Pool(data.train), 3),
        "share": (Pool(data.train, [(_noise(21, 12), 0.25)]), 1),
        "joined": (Pool(data.train, [(_noise(21, 12), None)]), 1),
        "all": (Pool(data.train, [(_noise(21, 12), 0.25), (_noise(9), None), (_noise(5, 6), 0.5)]), 2),
    }


WAYS = ["plain", "repeats", "uneven", "share", "joined", "all"]


def _load(pool: Pool, data: DataSet, repeats: int = 1, augment: Augment = PLAIN, **settings: Any) -> list[Batch]:
    settings = {"batch": 16, "seed": 0, "start": 0, "stop": 6, **settings}
    return list(training_batches(pool, TrainingTransform(augment, data), repeats=repeats, **settings))


def _batches(data: DataSet, **settings: Any) -> list[Batch]:
    return _load(Pool(data.train), data, **settings)


def _equal(a: list[Batch], b: list[Batch]) -> bool:
    def tensors(batches: list[Batch]) -> list[Tensor]:
        return [tensor for batch in batches for tensor in (batch.index, batch.x, batch.y)]

    return len(a) == len(b) and all(map(torch.equal, tensors(a), tensors(b)))


def test_an_epoch_shows_every_image_once_and_each_epoch_in_another_order(tiny_data: DataSet) -> None:
    batches = _batches(tiny_data)
    first, second = (torch.cat([b.index for b in batches[i : i + 3]]) for i in (0, 3))
    assert sorted(first.tolist()) == sorted(second.tolist()) == sorted(tiny_data.train.index.tolist())
    assert not torch.equal(first, second)
    assert torch.equal(torch.cat([b.y for b in batches[:3]]), first % 3)


def test_the_ragged_end_of_an_epoch_is_dropped(tiny_data: DataSet) -> None:
    """Three steps of 13 leave 9 of 48 images, which are not the first of the next epoch."""
    batches = _batches(tiny_data, batch=13)
    for epoch, order in enumerate(rng.permutation(0, f"epoch {epoch}", 48)[:39] for epoch in (0, 1)):
        shown = torch.cat([batch.index for batch in batches[3 * epoch : 3 * epoch + 3]])
        assert torch.equal(shown, tiny_data.train.index[order])


@pytest.mark.parametrize("repeats", [1, 2])
def test_an_image_is_augmented_by_seed_epoch_number_and_copy(tiny_data: DataSet, repeats: int) -> None:
    """The first copy without a number of its own: runs from before there were copies keep their bits."""
    augment = Augment(color_jitter=0.4)
    transform = TrainingTransform(augment, tiny_data)
    batch = _batches(tiny_data, repeats=repeats, augment=augment, seed=5)[4]
    images = batch.index % COPY
    for number in {*images.tolist()}:
        expected = set()
        for copy in ((), (1,))[:repeats]:
            with rng.preserved():
                rng.reseed("augment", 5, 1, number, *copy)
                expected.add(transform(tiny_data.train.image(number), 1).numpy().tobytes())
        assert {x.numpy().tobytes() for x in batch.x[images == number]} == expected
        assert len(expected) == repeats


@pytest.mark.parametrize("way", WAYS)
def test_starting_later_gives_the_same_batches(tiny_data: DataSet, way: str) -> None:
    pool, repeats = _pools(tiny_data)[way]
    augment = Augment(progressive=2, erasing=0.5, color_jitter=0.4, patchwise=PATCHWISE)
    whole = _load(pool, tiny_data, repeats, augment, stop=9)
    for start in range(1, 9):
        assert _equal(_load(pool, tiny_data, repeats, augment, start=start, stop=9), whole[start:]), start


@pytest.mark.parametrize("way", WAYS)
def test_worker_processes_change_nothing(tiny_data: DataSet, way: str) -> None:
    pool, repeats = _pools(tiny_data)[way]
    augment = Augment(progressive=2, erasing=0.5, color_jitter=0.4, patchwise=PATCHWISE)
    assert _equal(_load(pool, tiny_data, repeats, augment, workers=2), _load(pool, tiny_data, repeats, augment))


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
        batch_layout(Pool(tiny_data.train), 64)
    assert batch_layout(Pool(tiny_data.train), 13).steps == 3


@pytest.mark.parametrize("ranks", [2, 4, 3])
@pytest.mark.parametrize("way", WAYS)
def test_processes_share_out_the_batch_and_its_mixed_pairs(tiny_data: DataSet, way: str, ranks: int) -> None:
    """Together they have what one process has; where shares are even, MixUp of each is MixUp of the whole."""
    pool, repeats = _pools(tiny_data)[way]
    batch, augment = 24, Augment(patchwise=PATCHWISE)
    whole = _load(pool, tiny_data, repeats, augment, batch=batch)
    shares = [_load(pool, tiny_data, repeats, augment, batch=batch, rank=rank, ranks=ranks) for rank in range(ranks)]
    mix = mixing(Augment(mixup=0.8), 3, batch)

    def rows(batches: list[Batch]) -> Counter[bytes]:
        return Counter(x.numpy().tobytes() for batch in batches for x in batch.x)

    def mixed(batch: Batch) -> Batch:
        np.random.seed(0)
        return mix(batch, 0)

    for step, one in enumerate(whole):
        parts = [share[step] for share in shares]
        assert {len(part.x) for part in parts} == {batch // ranks}
        assert rows(parts) == rows([one])
        assert sorted(torch.cat([part.index for part in parts]).tolist()) == sorted(one.index.tolist())
        assert rows([mixed(part) for part in parts]) == rows([mixed(one)])


def test_patches_of_an_image_change_anew_in_each_epoch_and_copy(tiny_data: DataSet) -> None:
    still = Augment(crop="none", hflip=0.0, patchwise=Patchwise(size=2, prob=1.0, crop=0.0, noise=0.0, hflip=0.5))
    batches = _batches(tiny_data, augment=still, repeats=2)
    x, index = torch.cat([batch.x for batch in batches]), torch.cat([batch.index % COPY for batch in batches])
    assert len(index) == 2 * 3 * 16 and len(index.unique()) < 48
    for number in index.unique():
        copies = x[index == number].flatten(1)
        assert len(copies) in (2, 4) and len(copies.unique(dim=0)) == len(copies)


class TestRepeats:
    def test_a_batch_holds_copies_of_fewer_images_each_changed_in_its_own_way(self, tiny_data: DataSet) -> None:
        batches = _batches(tiny_data, repeats=4, augment=Augment(color_jitter=0.4))
        for batch in batches:
            images = batch.index % COPY
            assert sorted(Counter(images.tolist()).values()) == [4, 4, 4, 4]
            assert len({x.numpy().tobytes() for x in batch.x}) == 16
            assert torch.equal(batch.y, images % 3)

    @pytest.mark.parametrize("repeats", [1, 3, 4])
    def test_copies_have_random_numbers_of_their_own(self, tiny_data: DataSet, repeats: int) -> None:
        """All that is drawn in a step hangs on the index. That of the first copy is the image's, as without repeats."""
        for batch in _batches(tiny_data, repeats=repeats):
            assert len(batch.index.unique()) == 16
            assert {*(batch.index // COPY).tolist()} == {*range(repeats)}
            assert {*(batch.index % COPY).tolist()} <= {*tiny_data.train.index.tolist()}

    def test_an_epoch_has_as_many_steps_and_shows_its_part_of_the_images(self, tiny_data: DataSet) -> None:
        pool = Pool(tiny_data.train)
        assert batch_layout(pool, 16, 4).steps == batch_layout(pool, 16).steps == 3
        batches = _batches(tiny_data, repeats=4)
        first, second = ({*torch.cat([b.index % COPY for b in batches[i : i + 3]]).tolist()} for i in (0, 3))
        assert len(first) == len(second) == 12
        assert first != second

    def test_copies_of_the_last_image_go_on_in_the_next_batch(self, tiny_data: DataSet) -> None:
        """A batch of 16 has room for five images three times, and for one copy of a sixth."""
        batches = _batches(tiny_data, repeats=3, augment=Augment(color_jitter=0.4), stop=3)
        counts = [Counter((batch.index % COPY).tolist()) for batch in batches]
        assert [sorted(each.values()) for each in counts] == [
            [1, 3, 3, 3, 3, 3],
            [2, 2, 3, 3, 3, 3],
            [1, 3, 3, 3, 3, 3],
        ]
        order = tiny_data.train.index[rng.permutation(0, "epoch 0", 48)]
        assert sum(counts, Counter()) == Counter(dict.fromkeys(order[:16].tolist(), 3))
        assert len({x.numpy().tobytes() for batch in batches for x in batch.x}) == 48

    def test_copies_are_mixed_with_different_partners(self, tiny_data: DataSet) -> None:
        partners = {
            image: {*images.flip(0)[images == image].tolist()}
            for images in (batch.index % COPY for batch in _batches(tiny_data, repeats=4, stop=1))
            for image in images.tolist()
        }
        assert any(len(others) > 1 for others in partners.values())


class TestShift:
    """Crop and flip of a whole batch at once."""

    def test_every_image_is_one_of_its_windows(self, tiny_data: DataSet) -> None:
        """All offsets come, both ways round, and in every epoch others."""
        stored = {n: tiny_data.train.batch([p]).x[0] for p, n in enumerate(tiny_data.train.index.tolist())}
        places: dict[tuple[int, int, bool], int] = Counter()
        for batch in _batches(tiny_data, augment=Augment(padding=1), stop=90):
            for number, x in zip(batch.index.tolist(), batch.x, strict=True):
                padded = torch.nn.functional.pad(stored[number], (1, 1, 1, 1))
                windows = padded.unfold(1, 8, 1).unfold(2, 8, 1)  # (C, 3, 3, 8, 8)
                found = [
                    (*place, mirrored)
                    for mirrored in (False, True)
                    for place in (windows == (x.flip(-1) if mirrored else x)[:, None, None])
                    .all(0)
                    .flatten(2)
                    .all(2)
                    .nonzero()
                    .tolist()
                ]
                assert len(found) == 1, number
                places[found[0]] += 1
        assert len(places) == 18
        assert all(50 < count < 115 for count in places.values()), places  # 1440 draws: 80 each, give or take

    def test_pictures_of_all_sources_are_the_right_ones(self, tiny_data: DataSet) -> None:
        extra = _noise(21)
        pool = Pool(tiny_data.train, [(extra, 0.5)])
        for batch in _load(pool, tiny_data, augment=Augment(crop="none", hflip=0.0)):
            for number, x in zip(batch.index.tolist(), batch.x, strict=True):
                split, row = (extra, number - EXTRA) if number >= EXTRA else (tiny_data.train, number)
                assert torch.equal(x, split.batch([split.index.tolist().index(row)]).x[0])

    def test_one_by_one_would_do_as_much(self, tiny_data: DataSet) -> None:
        """Pictures of another size have to be fitted first: the same shifts, other draws."""
        pool = Pool(tiny_data.train, [(_noise(48, 12), 0.5)])
        slow, quick = (
            torch.cat([b.x[b.index < EXTRA] for b in _load(each, tiny_data, stop=300)]).mean((0, 1))
            for each in (pool, Pool(tiny_data.train))
        )
        assert torch.allclose(slow, quick, atol=0.02)  # black comes in at the rim as often

    @pytest.mark.parametrize("way", WAYS)
    def test_start_and_workers_change_nothing(self, tiny_data: DataSet, way: str) -> None:
        pool, repeats = _pools(tiny_data)[way]
        whole = _load(pool, tiny_data, repeats, stop=5)
        assert _equal(_load(pool, tiny_data, repeats, start=3, stop=5, workers=2), whole[3:])


class TestProgressive:
    def test_all_images_of_an_epoch_are_changed_with_its_strength(self, tiny_data: DataSet) -> None:
        """By the epoch of the step, also for extra images that are shown for the first time."""
        seen: list[int] = []

        class Watch(TrainingTransform):
            def __call__(self, image: Image, epoch: int) -> Tensor:
                seen.append(epoch)
                return torch.zeros(3, 8, 8)

        pool, watch = Pool(tiny_data.train, [(_noise(500), 0.5)]), Watch(Augment(color_jitter=0.4), tiny_data)
        list(training_batches(pool, watch, batch=32, seed=0, start=0, stop=9))
        assert seen == [epoch for epoch in (0, 1, 2) for _ in range(3 * 32)]

    def test_from_nothing_but_crop_and_flip_to_all(self, tiny_data: DataSet) -> None:
        full = Augment(color_jitter=0.4, erasing=1.0)
        growing = _batches(tiny_data, augment=full.model_copy(update={"progressive": 2}), stop=9)
        assert _equal(growing[:3], _batches(tiny_data, stop=3))
        assert not _equal(growing[3:6], _batches(tiny_data, augment=full, start=3))
        assert _equal(growing[6:], _batches(tiny_data, augment=full, start=6, stop=9))


class TestExtra:
    @pytest.mark.parametrize(("share", "count"), [(0.5, 8), (0.25, 4), (0.7, 11), (0.3, 5)])
    def test_every_batch_has_its_share_of_them(self, tiny_data: DataSet, share: float, count: int) -> None:
        pool = Pool(tiny_data.train, [(_noise(21), share)])
        batches = _load(pool, tiny_data, stop=20)
        assert {int((batch.index >= EXTRA).sum()) for batch in batches} == {count}
        assert batch_layout(pool, 16).steps == 48 // (16 - count)

    def test_an_epoch_is_counted_by_the_others(self, tiny_data: DataSet) -> None:
        batches = _load(Pool(tiny_data.train, [(_noise(100), 0.5)]), tiny_data, stop=12)
        for epoch in (batches[:6], batches[6:]):
            shown = torch.cat([batch.index for batch in epoch])
            assert sorted(shown[shown < EXTRA].tolist()) == sorted(tiny_data.train.index.tolist())

    @pytest.mark.parametrize("count", [21, 5])
    def test_all_of_them_are_used_up_before_one_comes_again(self, tiny_data: DataSet, count: int) -> None:
        """A turn ends in the middle of a batch, or several do."""
        batches = _load(Pool(tiny_data.train, [(_noise(count), 0.5)]), tiny_data, stop=21)
        shown = torch.cat([batch.index[batch.index >= EXTRA] for batch in batches]) - EXTRA
        assert len(shown) == 21 * 8
        assert {*Counter(shown.tolist()).values()} <= {len(shown) // count, len(shown) // count + 1}
        assert torch.equal(torch.cat([batch.y[batch.index >= EXTRA] for batch in batches]), shown % 3)

    def test_an_image_that_comes_twice_in_an_epoch_is_changed_differently(self, tiny_data: DataSet) -> None:
        (batch,) = _load(
            Pool(tiny_data.train, [(_noise(2), 0.5)]), tiny_data, augment=Augment(color_jitter=0.4), stop=1
        )
        assert len({x.numpy().tobytes() for x in batch.x}) == 16

    def test_the_data_sets_own_images_come_as_without_them(self, tiny_data: DataSet) -> None:
        alone = _load(Pool(tiny_data.train), tiny_data, batch=8)
        beside = _load(Pool(tiny_data.train, [(_noise(21), 0.5)]), tiny_data)
        for one, two in zip(alone, beside, strict=True):
            own = two.select(two.index < EXTRA)
            assert torch.equal(one.x[one.index.argsort()], own.x[own.index.argsort()])

    def test_they_stand_in_other_places_of_each_batch(self, tiny_data: DataSet) -> None:
        batches = _load(Pool(tiny_data.train, [(_noise(21), 0.5)]), tiny_data)
        assert len({tuple((batch.index >= EXTRA).tolist()) for batch in batches}) == 6

    def test_without_a_share_they_join_the_others(self, tiny_data: DataSet) -> None:
        pool = Pool(tiny_data.train, [(_noise(20), None), (_noise(12), None)])
        assert batch_layout(pool, 16).steps == 5
        shown = torch.cat([batch.index for batch in _load(pool, tiny_data, stop=5)]).tolist()
        extra = [*range(EXTRA, EXTRA + 20), *range(2 * EXTRA, 2 * EXTRA + 12)]
        assert sorted(shown) == sorted([*tiny_data.train.index.tolist(), *extra])

    def test_numbers_never_meet_and_images_belong_to_them(self, tiny_data: DataSet) -> None:
        """Whatever the order of splits with and without a share."""
        extra = [(_noise(5), 0.2), (_noise(7, 10), None), (_noise(9), 0.3)]
        pool = Pool(tiny_data.train, extra)
        assert len({*pool.index.tolist()}) == len(pool.index) == 48 + 5 + 7 + 9
        assert [len(source) for source in pool.sources] == [48 + 7, 5, 9]
        for position, (number, label) in enumerate(zip(pool.index.tolist(), pool.labels.tolist(), strict=True)):
            which, row = divmod(number, EXTRA)
            split = extra[which - 1][0] if which else tiny_data.train
            assert pool.image(position).tobytes() == split.image(row).tobytes()
            assert label == row % 3

    def test_pictures_of_any_size_come_in_the_shape_of_the_data(self, tiny_data: DataSet) -> None:
        for crop in ("pad", "resized", "none"):
            (batch,) = _load(
                Pool(tiny_data.train, [(_noise(9, 13), 0.5)]), tiny_data, augment=Augment(crop=crop), stop=1
            )
            assert batch.x.shape == (16, 3, 8, 8)

    def test_shares_that_leave_nothing_are_an_error(self, tiny_data: DataSet) -> None:
        for shares in ((0.5, 0.5), (0.01,), (0.99,)):
            with pytest.raises(BastionError, match=r"extra.share: of 16 images in a batch .* at least 1"):
                batch_layout(Pool(tiny_data.train, [(_noise(9), share) for share in shares]), 16)

    def test_the_images_of_the_data_set_must_fill_their_part(self, tiny_data: DataSet) -> None:
        pool = Pool(tiny_data.train, [(_noise(9), 0.5)])
        assert batch_layout(pool, 96).steps == 1
        with pytest.raises(BastionError, match="batch: 50 is more than the 48 training images"):
            batch_layout(pool, 100)

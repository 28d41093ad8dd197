"""Training batches whose order and augmentation do not depend on worker count or interruptions."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bastion import rng
from bastion.data.augment import TrainingTransform
from bastion.data.pool import Pool
from bastion.errors import BastionError
from bastion.types import Batch

_COPY_OFFSET = 1 << 48  # between the indices of an image's copies, more than any index in a pool


class Key(NamedTuple):
    """Everything that an augmented image depends on besides the seed."""

    position: int
    turn: int  # number of earlier passes over its source
    copy: int
    epoch: int


@dataclass(frozen=True)
class BatchLayout:
    """Composition of a batch: images of each source, counting copies."""

    counts: tuple[int, ...]
    repeats: int  # copies of an image
    steps: int  # of an epoch: one pass over the data set's own images, counting copies

    @property
    def batch(self) -> int:
        return sum(self.counts)


def batch_layout(pool: Pool, batch: int, repeats: int = 1) -> BatchLayout:
    """Round the shares of a batch to whole images; the data set's own images fill the rest."""
    counts = [round(share * batch) for share in pool.shares]
    own = batch - sum(counts)
    if own < 1 or 0 in counts:
        raise BastionError(
            f"extra.share: of {batch} images in a batch {own} would be the data set's own and {counts} extra ones; "
            "each must be at least 1: change a share, or make the batch larger"
        )
    length = len(pool.sources[0])
    if length < own:
        hint = "make it smaller" if length else "choose data to train on: this is only measured"
        raise BastionError(f"batch: {own} is more than the {length} training images; {hint}")
    return BatchLayout((own, *counts), repeats, length // own)


class _Augmented(Dataset[Batch]):
    def __init__(self, pool: Pool, transform: TrainingTransform, seed: int) -> None:
        self.pool, self.transform, self.seed = pool, transform, seed

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        positions = torch.tensor([key.position for key in keys])
        index = self.pool.index[positions]
        copy = torch.tensor([key.copy for key in keys])
        draw = torch.tensor([key.turn << 16 for key in keys]) + copy
        shift, patchwise = self.transform.shift(keys[0].epoch), self.transform.patchwise(keys[0].epoch)
        if shift and (stored := self.pool.pixels(positions)) is not None:
            x = shift(stored, index, seed=rng.key("augment", self.seed), draw=draw)
            x = x.float() / 255 if x.dtype == torch.uint8 else x
        else:
            x = self.one_by_one(keys, index)
        if patchwise:
            x = patchwise(x, index, seed=rng.key("patchwise", self.seed), draw=draw)
        # Copies share no random numbers in the objective either: noise, occluded patches, starts of attacks.
        return Batch(index + _COPY_OFFSET * copy, x, self.pool.labels[positions])

    def one_by_one(self, keys: Sequence[Key], index: Tensor) -> Tensor:
        pictures = []
        with rng.preserved():
            for key, number in zip(keys, index.tolist(), strict=True):
                rng.reseed("augment", self.seed, key.turn, number, *([key.copy] if key.copy else []))
                pictures.append(self.transform(self.pool.image(key.position), key.epoch))
        return torch.stack(pictures)


class _ShuffledSource:
    """The positions of a source in random order, reshuffled after each pass."""

    def __init__(self, positions: range, seed: int, name: str) -> None:
        self.positions, self.seed, self.name = positions, seed, name
        self.order = np.zeros(0, np.int64)
        self.turn = -1

    def take(self, start: int, count: int, repeats: int) -> Iterator[tuple[int, int, int]]:
        """Yield position, turn and copy from number `start` on; each position is repeated `repeats` times."""
        for number in range(start, start + count):
            image, copy = divmod(number, repeats)
            turn, place = divmod(image, len(self.positions))
            if turn != self.turn:
                order = rng.permutation(self.seed, f"{self.name} {turn}", len(self.positions))
                self.order, self.turn = order.numpy(), turn
            yield self.positions[int(self.order[place])], turn, copy


class _Order:
    """Lists of keys for steps `start` … `stop`: a new permutation each epoch, without its incomplete last batch.

    Each process gets its share of every batch.
    """

    def __init__(
        self, pool: Pool, layout: BatchLayout, seed: int, start: int, stop: int, rank: int, ranks: int
    ) -> None:
        self.sources, self.layout, self.seed, self.start, self.stop = pool.sources, layout, seed, start, stop
        self.share = _share(layout.batch, rank, ranks)

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[list[Key]]:
        own, *extra = (
            _ShuffledSource(positions, self.seed, f"extra {number}, turn" if number else "epoch")
            for number, positions in enumerate(self.sources)
        )
        count, *counts = self.layout.counts
        repeats = self.layout.repeats
        for step in range(self.start, self.stop):
            epoch, within = divmod(step, self.layout.steps)
            taken = [*own.take(epoch * len(own.positions) * repeats + within * count, count, repeats)]
            for source, each in zip(extra, counts, strict=True):
                taken += source.take(step * each, each, repeats)
            whole = sorted((Key(*each, epoch) for each in taken), key=lambda key: key.copy)
            if repeats > 1 or extra:  # else MixUp would always pair the same copies and sources
                whole = [whole[place] for place in rng.permutation(self.seed, f"places {step}", len(whole)).tolist()]
            yield [whole[place] for place in self.share]


def _share(batch: int, rank: int, ranks: int) -> list[int]:
    """Return this process's places in a batch. MixUp pairs the first image with the last, the second with the last but
    one, and so on: pairs stay together, so that the result does not depend on the number of processes."""
    if batch % (2 * ranks):
        return list(range(batch))[rank * batch // ranks : (rank + 1) * batch // ranks]
    half = batch // 2 // ranks
    front = range(rank * half, (rank + 1) * half)
    return [*front, *(batch - 1 - place for place in reversed(front))]


def training_batches(
    pool: Pool,
    transform: TrainingTransform,
    *,
    batch: int,
    seed: int,
    start: int,
    stop: int,
    repeats: int = 1,
    workers: int = 0,
    rank: int = 0,
    ranks: int = 1,
) -> DataLoader[Batch]:
    """Return a loader of the batches of steps `start` … `stop`, or of this process's share of them.

    With `repeats` (Hoffer et al. 2020) a batch holds that many differently augmented copies of fewer images, and an
    epoch of as many steps covers fewer images. If the batch is not a multiple, the copies of its last image continue in
    the next batch, as in DeiT. The indices of the n-th copies start at n · 2⁴⁸.
    """
    return DataLoader(
        _Augmented(pool, transform, seed),
        batch_sampler=_Order(pool, batch_layout(pool, batch, repeats), seed, start, stop, rank, ranks),
        collate_fn=_identity,
        num_workers=workers,
        worker_init_fn=_ignore_signals,
        pin_memory=torch.cuda.is_available(),
    )


def _ignore_signals(_: int) -> None:
    """Let only the trainer handle signals: it still needs batches to stop in order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _identity(batch: Any) -> Any:
    return batch

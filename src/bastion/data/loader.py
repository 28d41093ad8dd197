"""Training batches in an order and with an augmentation that no worker count or interruption changes."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from bastion import rng
from bastion.data.augment import Picture
from bastion.errors import BastionError
from bastion.types import Batch, Split

Key = tuple[int, int]  # epoch, position


class _Augmented(Dataset[Batch]):
    def __init__(self, split: Split, transform: Picture, seed: int) -> None:
        self.split, self.transform, self.seed = split, transform, seed

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        positions = torch.tensor([position for _, position in keys])
        index = self.split.index[positions]
        pictures = []
        with rng.preserved():
            for (epoch, position), number in zip(keys, index.tolist(), strict=True):
                rng.reseed("augment", self.seed, epoch, number)
                pictures.append(self.transform(self.split.image(position)))
        return Batch(index, torch.stack(pictures), self.split.labels[positions])


class _Order:
    """Lists of keys for steps `start` … `stop`: each epoch a new permutation, its ragged end dropped."""

    def __init__(self, length: int, batch: int, seed: int, start: int, stop: int) -> None:
        self.length, self.batch, self.seed, self.start, self.stop = length, batch, seed, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[list[Key]]:
        per_epoch = self.length // self.batch
        order, drawn = torch.empty(0), -1
        for step in range(self.start, self.stop):
            epoch, within = divmod(step, per_epoch)
            if epoch != drawn:
                order, drawn = rng.permutation(self.seed, f"epoch {epoch}", self.length), epoch
            yield [(epoch, int(p)) for p in order[within * self.batch : (within + 1) * self.batch]]


def training_batches(
    split: Split, transform: Picture, *, batch: int, seed: int, start: int, stop: int, workers: int = 0
) -> DataLoader[Batch]:
    """The batches of steps `start` … `stop` of a run."""
    return DataLoader(
        _Augmented(split, transform, seed),
        batch_sampler=_Order(len(split), batch, seed, start, stop),
        collate_fn=_as_is,
        num_workers=workers,
        worker_init_fn=_ignore_signals,
        pin_memory=torch.cuda.is_available(),
    )


def steps_per_epoch(split: Split, batch: int) -> int:
    if len(split) < batch:
        raise BastionError(f"batch: {batch} is more than the {len(split)} training images; make it smaller")
    return len(split) // batch


def _ignore_signals(_: int) -> None:
    """A signal to the whole group is the trainer's to act on: it still needs its batches to save in order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _as_is(batch: Any) -> Any:
    return batch

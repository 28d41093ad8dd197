"""Applies a common corruption to any data set: keys that every data set takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from PIL import Image
from torch import Tensor

from bastion.corruptions import VERSION, check_name, corrupt
from bastion.corruptions.frost import photographs_digest
from bastion.data.picture import as_picture
from bastion.storage import fingerprint
from bastion.types import Batch, DataSet, Split


@dataclass(frozen=True)
class Corruption:
    """A corruption and its settings. Its random numbers are fixed, as the corrupted images are data."""

    name: str
    severity: int
    jpeg85: bool
    textures: str | None

    def __call__(self, x: Tensor, index: Tensor) -> Tensor:
        return corrupt(x, self.name, self.severity, index=index, jpeg85=self.jpeg85, textures=self.textures)

    @cached_property
    def fingerprint(self) -> str:
        photographs = photographs_digest(self.textures) if self.name == "frost" else None
        return fingerprint([VERSION, self.name, self.severity, self.jpeg85, photographs])


class CorruptedSplit(Split):
    """The images of a split, corrupted on access."""

    def __init__(self, split: Split, corruption: Corruption) -> None:
        self._split, self._corruption = split, corruption
        self.index, self.labels = split.index, split.labels

    def image(self, position: int) -> Image.Image:
        """Return the image at the size it is measured at, as corruptions need images of one size."""
        pixels = (self.batch([position]).x[0] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        return as_picture(pixels)

    def batch(self, positions: Sequence[int]) -> Batch:
        batch = self._split.batch(positions)
        return batch._replace(x=self._corruption(batch.x, batch.index))

    def digest(self) -> str:
        return fingerprint([self._split.digest(), self._corruption.fingerprint])

    def subset(self, positions: Sequence[int]) -> CorruptedSplit:
        return CorruptedSplit(self._split.subset(positions), self._corruption)


def corrupted_name(name: str, corruption: str, severity: int) -> str:
    """Name of corrupted images, as `--data` takes it: their numbers are not those of the data set itself."""
    return f"{name}:corruption={corruption},severity={severity}"


def corrupted(
    data: DataSet,
    /,
    *,
    corruption: str | None = None,
    severity: int | None = None,
    jpeg85: bool = False,
    textures: str | None = None,
) -> DataSet:
    """Keys that every data set takes: `corruption` of a `severity` from 1 to 5, of all its images.

    `jpeg85` also stores them as JPEG of quality 85, as the files of ImageNet-C are. `textures` is the folder of the
    photographs that `frost` needs.
    """
    if corruption is None:
        if severity is not None or jpeg85 or textures is not None:
            raise ValueError("severity, jpeg85 and textures go with a `corruption`; name one")
        return data
    if severity is None:
        raise ValueError(f"corruption: {corruption} needs a `severity` from 1 to 5")
    check_name(corruption, severity)
    chosen = Corruption(corruption, severity, jpeg85, textures)
    return replace(
        data,
        name=corrupted_name(data.name, corruption, severity) + ",jpeg85=true" * jpeg85,
        train=CorruptedSplit(data.train, chosen),
        val=CorruptedSplit(data.val, chosen),
        test=CorruptedSplit(data.test, chosen),
        fingerprint=fingerprint([data.fingerprint, chosen.fingerprint]),
    )

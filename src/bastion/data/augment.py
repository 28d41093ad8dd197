"""Training images: timm's transforms, with every example's randomness fixed by (seed, epoch, index)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bastion._torchvision  # noqa: F401  (before timm)

# isort: split
import torch
from PIL.Image import Image
from timm.data import Mixup, create_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision import transforms

from bastion.errors import BastionError
from bastion.recipe import Augment
from bastion.types import Batch, DataSet

Picture = Callable[[Image], Tensor]  # a stored picture to a float (C, H, W) in [0, 1]


class TrainingTransform:
    """Crop, flip, jitter, policy and erasing, as the recipe says."""

    def __init__(self, augment: Augment, data: DataSet) -> None:
        height, width = data.shape[1:]
        try:
            steps: list[Any] = create_transform(
                input_size=(height, width),
                is_training=True,
                scale=augment.scale,
                ratio=augment.ratio,
                hflip=augment.hflip,
                color_jitter=augment.color_jitter or None,  # 0 would still cost a tenth of a millisecond an image
                auto_augment=augment.auto_augment,
                interpolation="bicubic",
                mean=data.mean,  # the fill colour of auto-augment; nothing is normalised here
                normalize=False,
            ).transforms
        except (AssertionError, LookupError, TypeError, ValueError) as error:
            raise BastionError(f"augment: timm cannot make {augment}: {error or type(error).__name__}") from error
        if augment.crop != "resized":
            shift = [transforms.RandomCrop((height, width), padding=augment.padding)] if augment.crop == "pad" else []
            steps = [_Fit(height, width), *shift, *steps[1:]]
        self.steps = steps
        self.erase = _Erase(augment.erasing, data) if augment.erasing > 0 else None

    def __call__(self, image: Image) -> Tensor:
        changed: Any = image
        for step in self.steps:
            changed = step(changed)
        x = torch.as_tensor(changed).float() / 255
        return self.erase(x) if self.erase else x


class _Fit:
    """Any picture to one size: the shorter side resized, the centre kept. Leaves pictures of that size alone."""

    def __init__(self, height: int, width: int) -> None:
        self.size = (width, height)
        resize = transforms.Resize(max(height, width), interpolation=transforms.InterpolationMode.BICUBIC)
        self.change = transforms.Compose([resize, transforms.CenterCrop((height, width))])

    def __call__(self, image: Image) -> Image:
        return image if image.size == self.size else self.change(image)


class _Erase:
    """timm's RandomErasing with noise of the data's own mean and std. It fills with a standard normal, which
    suits normalised images; erasing a sheet of NaN shows where and with what, and keeps the pixels in [0, 1]."""

    def __init__(self, probability: float, data: DataSet) -> None:
        self.eraser = RandomErasing(probability, mode="pixel", device="cpu")
        self.mean = torch.tensor(data.mean).view(-1, 1, 1)
        self.std = torch.tensor(data.std).view(-1, 1, 1)

    def __call__(self, x: Tensor) -> Tensor:
        noise = self.eraser(torch.full_like(x, torch.nan))
        return torch.where(noise.isnan(), x, (self.mean + self.std * noise).clamp(0, 1))


def mixing(augment: Augment, num_classes: int, batch: int) -> Callable[[Batch], Batch]:
    """MixUp and CutMix over a batch; they turn labels soft. Draws from numpy's generator: reseed it before."""
    if augment.mixup == 0 and augment.cutmix == 0:
        return lambda unchanged: unchanged
    if batch % 2:
        raise BastionError(f"batch: MixUp and CutMix pair the images of a batch, so its size must be even, got {batch}")
    mix = Mixup(
        mixup_alpha=augment.mixup,
        cutmix_alpha=augment.cutmix,
        prob=augment.mix_prob,
        switch_prob=augment.switch_prob,
        label_smoothing=0.0,  # the objective smooths
        num_classes=num_classes,
    )

    def apply(batch: Batch) -> Batch:
        x, y = mix(batch.x.clone(), batch.y)
        return Batch(batch.index, x.clamp(0, 1), y)

    return apply

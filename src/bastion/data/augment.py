"""Training augmentation: timm's transforms, with every example's randomness fixed by (seed, epoch, index).

If there is only crop and flip, a batch is shifted and mirrored as one tensor, not image by image.

A progressive recipe starts with crop and flip only; all else grows to full strength in its first epochs, as heavy
augmentation from the start can keep adversarially trained ViTs from learning (Bai et al. 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from PIL.Image import Image, new
from timm.data import Mixup, create_transform
from timm.data import auto_augment as policies
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision import transforms

from bastion import rng
from bastion.data.patchwise import PatchTransform, patch_size
from bastion.errors import BastionError
from bastion.recipe import Augment
from bastion.types import Batch, DataSet

CIFAR10 = "cifar10"  # the policy that Cubuk et al. 2019 found on CIFAR-10, which torchvision has and timm lacks

# RandAugment's operations that get stronger with a smaller magnitude, and those with an effect at magnitude 0.
REVERSED = {"Posterize", "PosterizeOriginal", "Solarize", "Color", "Contrast", "Brightness", "Sharpness"}
ABRUPT = {"AutoContrast", "Equalize", "Invert", "PosterizeIncreasing", "Desaturate", "GaussianBlur"}


def strength(augment: Augment, epoch: int) -> float:
    """Return the strength, from 0 at the start to 1 after `progressive` epochs, constant within an epoch."""
    return min(1.0, epoch / augment.progressive) if augment.progressive else 1.0


class TrainingTransform:
    """Crop, flip, jitter, policy and erasing, at the strength of an epoch."""

    def __init__(self, augment: Augment, data: DataSet) -> None:
        self.augment, self.data = augment, data
        self._chains: dict[float, _Chain] = {}
        for epoch in (0, 1, math.ceil(augment.progressive)):  # raises now if timm cannot make one
            self.chain(epoch)

    def __call__(self, image: Image, epoch: int) -> Tensor:
        """Transform an image to float (C, H, W) in [0, 1]. Uses the global generators: reseed them before."""
        return self.chain(epoch)(image)

    def shift(self, epoch: int) -> Shift | None:
        """Return the shift if it is the only augmentation of images of the right size, else None."""
        return self.chain(epoch).shift

    def patchwise(self, epoch: int) -> PatchTransform | None:
        """Return the patch-wise augmentation, which is applied last, to a batch."""
        return self.chain(epoch).patchwise

    def chain(self, epoch: int) -> _Chain:
        part = strength(self.augment, epoch)
        if part not in self._chains:
            self._chains[part] = _Chain(self.augment, self.data, part)
        return self._chains[part]


@dataclass(frozen=True)
class Shift:
    """Random crop of a batch with `reach` pixels of black padding, and horizontal flip."""

    reach: int
    hflip: float

    def __call__(self, x: Tensor, index: Tensor, *, seed: int, draw: rng.Draw) -> Tensor:
        batch, _, height, width = x.shape
        down, right, flip = rng.uniform(seed, index, draw, (3,)).unbind(1)
        top, left = ((each * (2 * self.reach + 1)).long()[:, None] for each in (down, right))
        across = torch.arange(width).expand(batch, width)
        columns = left + torch.where(flip[:, None] < self.hflip, across.flip(1), across)
        rows = top + torch.arange(height)
        pixels = F.pad(x, [self.reach] * 4).permute(0, 2, 3, 1)
        moved = pixels[torch.arange(batch)[:, None, None], rows[:, :, None], columns[:, None, :]]
        return moved.permute(0, 3, 1, 2).contiguous()


class _Chain:
    """The transform of an image at one strength, which crop and flip do not depend on."""

    def __init__(self, augment: Augment, data: DataSet, strength: float) -> None:
        height, width = data.shape[1:]
        of_cifar = augment.auto_augment == CIFAR10
        try:
            steps: list[Any] = create_transform(
                input_size=(height, width),
                is_training=True,
                scale=augment.scale,
                ratio=augment.ratio,
                hflip=augment.hflip,
                # 0 would still cost a tenth of a millisecond an image
                color_jitter=(not of_cifar and strength * augment.color_jitter) or None,
                auto_augment=augment.auto_augment if strength and not of_cifar else None,
                interpolation="bicubic",
                mean=data.mean,  # fill colour of auto-augment; nothing is normalised here
                normalize=False,
            ).transforms
        except (AssertionError, LookupError, TypeError, ValueError) as error:
            raise BastionError(f"augment: timm cannot make {augment}: {error or type(error).__name__}") from error
        if of_cifar and strength:
            grey = [round(255 * channel) for channel in data.mean]
            policy = transforms.AutoAugment(transforms.AutoAugmentPolicy.CIFAR10, fill=grey)
            steps.insert(-1, policy)  # the last step converts to a tensor
        self.shift: Shift | None = None
        if augment.crop != "resized":
            plain = not (strength and (augment.color_jitter or augment.auto_augment or augment.erasing))
            self.shift = Shift(augment.padding if augment.crop == "pad" else 0, augment.hflip) if plain else None
            shift = [transforms.RandomCrop((height, width), padding=augment.padding)] if augment.crop == "pad" else []
            steps = [_Fit(height, width), *shift, *steps[1:]]
        for operation in _operations(steps):
            operation.aug_fn = posterize if operation.aug_fn is policies.posterize else operation.aug_fn
        if augment.auto_augment and augment.progressive and strength:
            _weaken(steps, strength, augment.auto_augment)
        self.steps = steps
        self.patchwise: PatchTransform | None = None
        if augment.patchwise:
            size = patch_size(augment.patchwise.size, height, width)
            self.patchwise = PatchTransform(augment.patchwise, size, strength)
        self.erase = _Erase(strength * augment.erasing, data) if strength * augment.erasing > 0 else None

    def __call__(self, image: Image) -> Tensor:
        changed: Any = image
        for step in self.steps:
            changed = step(changed)
        x = torch.as_tensor(changed).float() / 255
        return self.erase(x) if self.erase else x


def _operations(steps: list[Any]) -> list[policies.AugmentOp]:
    """Return the operations of the policy, if there is one."""
    for step in steps:
        if isinstance(step, policies.RandAugment | policies.AugMixAugment):
            return list(step.ops)
        if isinstance(step, policies.AutoAugment):
            return [operation for pair in step.policy for operation in pair]
    return []


def posterize(image: Image, bits: int, **_: Any) -> Image:
    """timm's posterize; 0 bits give a black image, as in older Pillows, where newer ones raise."""
    posterized: Image = policies.posterize(image, bits) if bits > 0 else new(image.mode, image.size)
    return posterized


def _weaken(steps: list[Any], strength: float, policy: str) -> None:
    """Scale RandAugment's magnitude, and the probability of operations with an effect at magnitude 0."""
    if not any(isinstance(step, policies.RandAugment) for step in steps):
        raise BastionError(
            f"augment.progressive: the policy '{policy}' has no magnitude that could grow; take one of RandAugment, "
            "such as rand-m9-mstd0.5-inc1, or set progressive to 0"
        )
    for operation in _operations(steps):
        if operation.name in REVERSED:
            raise BastionError(
                f"augment.progressive: in '{policy}' {operation.name} is stronger with a smaller magnitude; add -inc1"
            )
        operation.magnitude *= strength
        operation.prob *= strength if operation.name in ABRUPT else 1


class _Fit:
    """Resize the shorter side and crop the centre; images of the right size are unchanged."""

    def __init__(self, height: int, width: int) -> None:
        self.size = (width, height)
        resize = transforms.Resize(max(height, width), interpolation=transforms.InterpolationMode.BICUBIC)
        self.change = transforms.Compose([resize, transforms.CenterCrop((height, width))])

    def __call__(self, image: Image) -> Image:
        return image if image.size == self.size else self.change(image)


class _Erase:
    """timm's RandomErasing with noise of the data's mean and std, clipped to [0, 1]. timm fills with a standard normal,
    for normalised images; erasing a tensor of NaN gives the positions and the noise."""

    def __init__(self, probability: float, data: DataSet) -> None:
        self.eraser = RandomErasing(probability, mode="pixel", device="cpu")
        self.mean = torch.tensor(data.mean).view(-1, 1, 1)
        self.std = torch.tensor(data.std).view(-1, 1, 1)

    def __call__(self, x: Tensor) -> Tensor:
        noise = self.eraser(torch.full_like(x, torch.nan))
        return torch.where(noise.isnan(), x, (self.mean + self.std * noise).clamp(0, 1))


def mixing(augment: Augment, num_classes: int, batch: int) -> Callable[[Batch, int], Batch]:
    """Return MixUp and CutMix of a batch in an epoch, with soft labels. Uses numpy's generator: reseed it before."""
    if augment.mixup == 0 and augment.cutmix == 0:
        return lambda unchanged, _: unchanged
    if batch % 2:
        raise BastionError(f"batch: MixUp and CutMix pair the images of a batch, so its size must be even, got {batch}")
    mix = Mixup(
        mixup_alpha=augment.mixup,
        cutmix_alpha=augment.cutmix,
        switch_prob=augment.switch_prob,
        label_smoothing=0.0,  # the objective smooths
        num_classes=num_classes,
    )

    def apply(batch: Batch, epoch: int) -> Batch:
        mix.mix_prob = augment.mix_prob * strength(augment, epoch)
        x, y = mix(batch.x.clone(), batch.y)
        return Batch(batch.index, x.clamp(0, 1), y)

    return apply

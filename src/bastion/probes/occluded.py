"""Base classes of probes on images with a share of their patches occluded (Eq. 1 of RSPC), random or learned ones."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from bastion import rng
from bastion.attacks.patch import PatchOcclusion
from bastion.errors import BastionError
from bastion.forward import Delegate
from bastion.models import Classifier, checkpoint
from bastion.models.corruption_model import CorruptionModel, load_corruption_model
from bastion.models.load import locate
from bastion.patches import Grid, attention_outputs, default_patch_size
from bastion.settings import AtLeastOne, Share, settings
from bastion.threat import Threat
from bastion.types import Batch, Description, Probe

FREE = Threat("linf", 1.0)  # allows any change of a pixel


@settings
class MaskedProbe(Probe):
    """A probe that changes a share of the patches: random ones, determined by seed, index and number of the mask.

    Mask 0 is that of the first draw of the attack `patch-occlusion`, mask 1 of the second. With `corruption_model`, the
    patches are those that it picks, the same for every mask.
    """

    share: Share = 0.1  # of the patches, ρ in RSPC
    # Side of a patch in pixels, of the images at the size that the model resizes them to; null: as the model's tokens.
    size: AtLeastOne | None = 8
    corruption_model: str | None = None  # a run of the objective rspc, or its model folder
    identity: str = field(init=False, default="")  # of the corruption model's weights, which facts depend on

    name: ClassVar[str]

    def __post_init__(self) -> None:
        if self.corruption_model is not None:
            object.__setattr__(self, "identity", _identity(self.corruption_model))

    def revisions(self, model: nn.Module) -> tuple[int, ...]:
        """As described; 2 besides where random masks were once drawn before the model resized the images."""
        resizes = (own := _classifier(model)) is not None and own.resize is not None and own.shape[1:] != own.size
        return (*self.describe().revisions, *([2] if resizes and self.corruption_model is None else []))

    def at_mask_size(self, model: nn.Module, batch: Batch) -> tuple[Batch, Grid]:
        """The images at the size that the model resizes them to, and their patches there.

        Interpolation overshoots: they are clipped to [0, 1]. For a corruption model only if that is the size it takes.
        """
        own, learned = _classifier(model), self._learned(batch.x.device)
        x = batch.x if own is None else own.resized(batch.x)
        if x is not batch.x and (learned is None or x.shape[2:] == (learned.grid.height, learned.grid.width)):
            batch = batch.at(x.clamp(0, 1))
        return batch, Grid.of(batch.x, self._token_size(model, batch.x)) if learned is None else learned.grid

    def masks_of(self, batch: Batch, grid: Grid, numbers: Sequence[int], *, seed: int) -> Iterator[Tensor]:
        """(B, 1, H, W) bool for each of the masks' numbers: the pixels of the chosen patches."""
        if (learned := self._learned(batch.x.device)) is not None:
            mask = grid.mask(learned.choose(batch.x, self.share))
            yield from (mask for _ in numbers)
            return
        for number in numbers:
            draw = rng.key(PatchOcclusion.name, "patches", number)
            yield grid.mask(grid.random(batch.index, grid.share(self.share), seed=seed, draw=draw))

    def _learned(self, device: torch.device) -> CorruptionModel | None:
        if self.corruption_model is None:
            return None
        model = _corruption_model(self.corruption_model, self.identity, device)
        if self.size not in (None, model.grid.size):
            raise BastionError(
                f"probe {self.name}: the corruption model of {self.corruption_model} has patches of {model.grid.size} "
                f"pixels, the probe of {self.size}; set size={model.grid.size}"
            )
        return model

    def _token_size(self, model: nn.Module, x: Tensor) -> int:
        """`size`, or that of the model's tokens."""
        if self.size is not None:
            return self.size
        outputs = [each.shape[1:] for each in attention_outputs(model, x.shape[1:]).values()]
        if not outputs:
            raise BastionError(f"probe {self.name}: size: this model has no self-attention, whose tokens would give it")
        return default_patch_size(outputs, x.shape[1:])


@settings
class OccludedProbe(MaskedProbe):
    """A probe on occluded images, under several masks each."""

    masks: Annotated[int, Ge(1), Le(2**20)] = 1  # per image
    fill: Literal["noise", "zero"] = "noise"  # uniform noise, drawn for each mask, or black

    def describe(self) -> Description:
        return Description(revisions=(PatchOcclusion.revision,), passes=self.masks + 1)

    def occluded(self, batch: Batch, grid: Grid, numbers: Sequence[int], *, seed: int) -> Batch:
        """The images under each of these masks: all images under the first, then all under the second, …"""
        images = [
            self._fill(batch, mask, number, seed=seed)
            for number, mask in zip(numbers, self.masks_of(batch, grid, numbers, seed=seed), strict=True)
        ]
        times = len(numbers)
        return Batch(batch.index.repeat(times), torch.cat(images), torch.cat([batch.y] * times))

    def _fill(self, batch: Batch, mask: Tensor, number: int, *, seed: int) -> Tensor:
        if self.fill == "zero":
            return batch.x.masked_fill(mask, 0)
        draw = rng.key(PatchOcclusion.name, number)
        return PatchOcclusion().filled(batch, mask, FREE, seed=seed, draw=draw)

    def full_batches(self, batch: Batch, size: int) -> Iterator[tuple[Tensor, list[range]]]:
        """Positions of examples, and numbers of masks, that together make batches of about `size` images."""
        examples, masks = torch.arange(len(batch.x), device=batch.x.device), range(self.masks)
        some = max(1, min(len(examples), size))
        together = max(1, size // some)
        for first in range(0, len(examples), some):
            chunks = [masks[start : start + together] for start in range(0, self.masks, together)]
            yield examples[first : first + some], chunks


def true_class(logits: Tensor, y: Tensor) -> Tensor:
    """(B,): the softmax probability of the true class."""
    return logits.softmax(1).gather(1, y[:, None])[:, 0]


def _classifier(model: nn.Module) -> Classifier | None:
    """The classifier that a wrapper such as a choice of classes runs."""
    while isinstance(model, Delegate):
        model = getattr(model, model.inner)
    return model if isinstance(model, Classifier) else None


def _identity(source: str) -> str:
    """A fingerprint of the corruption model's weights."""
    networks = checkpoint.read_card(locate(source)).networks
    if networks is None:
        load_corruption_model(source)  # says what is missing
    return (networks or "")[:16]


@functools.lru_cache(maxsize=8)
def _corruption_model(source: str, identity: str, device: torch.device) -> CorruptionModel:
    """Loaded on first use, once in each process."""
    if _identity(source) != identity:
        raise BastionError(f"corruption model of {source}: it changed on the disk while it was used; measure again")
    return load_corruption_model(source).to(device)

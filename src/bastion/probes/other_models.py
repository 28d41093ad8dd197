"""Models that a probe needs besides the measured one: given by name, loaded on first use."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bastion import forward, storage
from bastion.acceleration import Accelerated, accelerate
from bastion.errors import BastionError
from bastion.models import checkpoint
from bastion.models.columns import columns_of, take_columns
from bastion.models.load import load, locate
from bastion.types import Batch


def identity(name: str) -> str:
    """A fingerprint of the model's weights and of how they are used, which a probe's facts depend on."""
    card = checkpoint.read_card(locate(name))
    return storage.fingerprint(card.model_dump(mode="json", exclude={"about", "format", "logits"}), digits=16)


def other_model(name: str, known: str, model: nn.Module, batch: Batch, where: str) -> Accelerated:
    """The named model, of the identity `known`, on the device and for the images and classes of the measured model."""
    shape, accelerated = tuple(batch.x.shape[1:]), getattr(model, "enabled", True)
    return _loaded(name, known, shape, batch.x.device, accelerated, columns_of(model), where)


@functools.lru_cache(maxsize=16)
def _loaded(
    name: str,
    known: str,
    shape: tuple[int, int, int],
    device: torch.device,
    accelerated: bool,
    columns: tuple[int, ...] | None,
    where: str,
) -> Accelerated:
    """Loaded once in each process."""
    other = load(name).to(device)
    if identity(name) != known:
        raise BastionError(f"{where} {name} changed on the disk while it was used; measure again")
    other.check_input(shape, f"{where} {name}")
    if columns is not None:
        chosen = take_columns(other, other.num_classes, columns, f"{where} {name}: the class map")
        return accelerate(chosen, enabled=accelerated)
    return accelerate(other, enabled=accelerated)


def other_logits(other: nn.Module, x: Tensor, classes: int, where: str) -> Tensor:
    """Logits without a gradient; an error if the number of classes is not that of the measured model."""
    with torch.no_grad():
        logits = forward.logits(other, x)
    if logits.shape[1] != classes:
        raise BastionError(
            f"{where} has {logits.shape[1]} classes, the measured model {classes}; "
            "take one that was trained on the same data"
        )
    return logits


def logits_of_others(
    names: Sequence[str], identities: Sequence[str], model: nn.Module, batch: Batch, classes: int, where: str
) -> list[Tensor]:
    """The logits of each named model at batch.x."""
    return [
        other_logits(other_model(name, known, model, batch, where), batch.x, classes, f"{where} {name}")
        for name, known in zip(names, identities, strict=True)
    ]

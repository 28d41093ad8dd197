"""Growth of a perturbation from block to block (Wang and Ruan 2022, Sec. 4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor, nn

from bastion import rng
from bastion.attacks import Attack, Threat
from bastion.attacks.judge import judge
from bastion.attacks.pgd import PGD
from bastion.forward import check_batch
from bastion.jacobians.parts import Chain
from bastion.probes import probes
from bastion.probes.adversarial import describe_attack
from bastion.settings import settings
from bastion.threat import length
from bastion.types import Batch, Description, Probe

AT_ONCE = 16  # examples whose block outputs are kept in memory at once


@probes.register("perturbation-growth")
@settings
class PerturbationGrowth(Probe):
    """‖Δx‖₂ after every residual block, between the clean and the attacked image.

    For comparison, the same for noise: the perturbation with its pixels in random order. Misclassified images are not
    attacked.
    """

    threat: Threat
    attack: Attack = field(default_factory=PGD)

    facts: ClassVar[Mapping[str, str]] = {
        "attacked": "‖Δx‖₂ at the input of the first block and after each block; NaN for misclassified clean images",
        "entering": "‖Δx‖₂ at the input of each block; differs from that after the block before if layers are between",
        "noise": "as `attacked`, with the pixels of the perturbation in random order",
        "pixels": "‖δ‖₂ of the perturbation of the image",
        "gain": "‖Δx‖₂ after the last block over that at the input of the first one",
    }

    def describe(self) -> Description:
        return describe_attack(self.attack, self.threat)

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        verdict = judge(model, batch, self.attack, self.threat, seed=seed)
        given, batch = check_batch(model, batch, "perturbation-growth")
        count = -(-len(batch.x) // AT_ONCE)
        chunks = [
            _growth(given, part, x, seed) for part, x in zip(batch.chunk(count), verdict.x.chunk(count), strict=True)
        ]
        facts = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
        facts["gain"] = facts["attacked"][:, -1] / facts["attacked"][:, 0]
        for column in facts.values():
            column[~verdict.clean.cpu()] = torch.nan
        return facts


def _growth(model: nn.Module, batch: Batch, x: Tensor, seed: int) -> dict[str, Tensor]:
    delta = (x - batch.x).flatten(1)
    order = rng.bits(seed, batch.index, "perturbation-growth", delta.shape[1:]).argsort(dim=1)
    shuffled = batch.x + delta.gather(1, order).view_as(x)
    clean, attacked, noisy = (Chain(model, each, "perturbation-growth") for each in (batch.x, x, shuffled))
    return {
        "attacked": _distances(clean, attacked),
        "entering": _by_block(clean, attacked, "x"),
        "noise": _distances(clean, noisy),
        "pixels": length("l2", delta).float().cpu(),
    }


def _distances(clean: Chain, other: Chain) -> Tensor:
    """(B, 1 + blocks)"""
    first = _distance(clean.calls[0].x, other.calls[0].x)
    return torch.cat([first[:, None], _by_block(clean, other, "y")], dim=1)


def _by_block(clean: Chain, other: Chain, side: str) -> Tensor:
    """(B, blocks), in the order in which they run."""
    pairs = zip(clean.calls, other.calls, strict=True)
    return torch.stack([_distance(getattr(one, side), getattr(two, side)) for one, two in pairs], dim=1)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    return length("l2", (a - b).double()).float().cpu()

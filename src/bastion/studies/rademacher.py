"""Growth of the Rademacher complexity of linear classifiers with the dimension (Lemma 1 of Tang et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bastion import rng
from bastion.errors import BastionError
from bastion.settings import AtLeastOne, NotNegative, settings
from bastion.studies import studies
from bastion.studies.examples import SplitName, first_examples
from bastion.types import DataSet, Needs, Study

# θ with ‖θ‖_p ≤ 1, for p = 1, 2 and ∞; the suprema are norms of the dual order q, 1/p + 1/q = 1.
P = (1.0, 2.0, math.inf)
Q = (math.inf, 2.0, 1.0)
SMALLEST = 4  # pixels per side
CHUNK = 1 << 22  # numbers computed at once
# The lemma states that such a constant exists; this one is proved as follows. With u = Σσᵢyᵢxᵢ and s = Σσᵢ, averaging
# over σ and -σ shows that the adversarial complexity is at least the clean one and at least half of ε·d^(1/q)·E|s|/n;
# E|s| ≥ √(n/2) by Khintchine's inequality (Szarek 1976). Together (R + T)/(1 + 2√2) ≤ R_adv, where T = ε·d^(1/q)/√n.
C = 2 / (1 + 2 * math.sqrt(2))


@studies.register("rademacher")
@settings
class Rademacher(Study):
    """Empirical complexity of linear classes ‖θ‖_p ≤ 1, clean and under linf attacks, and both bounds of Eq. 4.

    It depends on the data only, not on the model. Images are downsampled for smaller dimensions, one part per size.
    Labels are +1 for the first half of the classes and -1 for the others. Facts have columns for p = 1, 2 and ∞.
    """

    eps: NotNegative = 8 / 255
    images: AtLeastOne = 500
    split: SplitName = "train"
    sides: tuple[AtLeastOne, ...] = ()  # of the images, in pixels; empty: their own, half of it, … down to 4
    draws: AtLeastOne = 1000  # of the signs σ, which are averaged over
    centred: bool = True  # the mean image is subtracted

    facts: ClassVar[Mapping[str, str]] = {
        "dimension": "number of values in an image",
        "n": "number of images",
        "clean": "R of Eq. 3, for p = 1, 2, ∞",
        "clean_error": "its standard error, over draws of the signs",
        "adversarial": "the same of the worst case in the linf ball",
        "adversarial_error": "its standard error",
        "lower": "(c/2)(R + ε·d^(1-1/p)/√n) with c = 2/(1 + 2√2)",
        "upper": "R + ε·d^(1-1/p)/√n",
    }

    def needs(self, model: nn.Module) -> Needs:
        return Needs(self.split, self.images, "images")

    def parts(self, model: nn.Module, data: DataSet) -> int:
        return len(self._sides(data))

    def __call__(self, model: nn.Module, data: DataSet, part: int, *, seed: int) -> dict[str, Tensor]:
        batch = first_examples(data, self.split, self.images, "rademacher.images")
        side = self._sides(data)[part]
        x = F.interpolate(batch.x.double(), (side, side), mode="area").flatten(1)
        x = x - x.mean(0) if self.centred else x
        y = torch.where(batch.y < len(data.classes) / 2, 1.0, -1.0).double()
        n, d = x.shape
        signs = rng.signs(seed, torch.arange(self.draws), "rademacher", (n,), dtype=torch.float64)
        clean, adversarial = suprema(x, y, signs, 0.0), suprema(x, y, signs, self.eps)
        extra = torch.tensor([self.eps * d ** (1 / q) / math.sqrt(n) for q in Q]).double()
        return {
            "dimension": torch.tensor(d),
            "n": torch.tensor(n),
            "clean": clean.mean(0),
            "clean_error": _error(clean),
            "adversarial": adversarial.mean(0),
            "adversarial_error": _error(adversarial),
            "lower": C / 2 * (clean.mean(0) + extra),
            "upper": clean.mean(0) + extra,
        }

    def _sides(self, data: DataSet) -> tuple[int, ...]:
        own = min(data.shape[1:])
        if any(side > own for side in self.sides):
            raise BastionError(
                f"rademacher.sides: the images of {data.name} have {own} pixels a side, got {max(self.sides)}; larger "
                "ones would have no more to say"
            )
        halves = [own >> times for times in range(own.bit_length()) if own >> times >= min(SMALLEST, own)]
        return self.sides or tuple(reversed(halves))


def suprema(x: Tensor, y: Tensor, signs: Tensor, eps: float) -> Tensor:
    """(draws, 3): sup over ‖θ‖_p ≤ 1 of (1/n)Σσᵢ·min_δ yᵢθ·(xᵢ + δ), ‖δ‖_∞ ≤ eps, for each row of signs (draws, n).

    The minimum is yᵢθ·xᵢ - eps·‖θ‖₁, so the sum is θ·u - eps·s·‖θ‖₁, which is largest where θ has the signs of u: the
    supremum is the q-norm of the positive part of |u| - eps·s.
    """
    rows = []
    for some in signs.chunk(-(-signs.shape[0] * x.shape[1] // CHUNK)):
        u, s = (some * y) @ x, some.sum(1, keepdim=True)
        gain = (u.abs() - eps * s).clamp(min=0)  # (draws, d)
        rows.append(torch.stack([torch.linalg.vector_norm(gain, q, dim=1) for q in Q], dim=1) / len(x))
    return torch.cat(rows)


def _error(values: Tensor) -> Tensor:
    """Standard error of the mean over the first axis."""
    return values.std(0, correction=min(1, len(values) - 1)) / math.sqrt(len(values))

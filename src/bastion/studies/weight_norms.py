"""Norms of the weights that occur in bounds on generalisation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from bastion.attacks.losses import margin
from bastion.forward import device_of, predict
from bastion.models.weight_kinds import KINDS, Kind, Weight, weights
from bastion.settings import AtLeastOne, NotNegative, settings
from bastion.studies import studies
from bastion.studies.examples import SplitName, first_examples
from bastion.types import DataSet, Study

BATCH = 100


@studies.register("weight-norms")
@settings
class WeightNorms(Study):
    """l1, spectral and (2,1) norms of every weight, and 2εb₁b₂/(γ√n) of every block (Theorem 1 of Tang et al. 2022).

    A weight is taken as a matrix with a row for each output. In the theorem, on W·φ(A·x) with an attention layer A, b₁
    and b₂ bound the l1 norms of the rows of A and of W. Here b₁ of a block is the largest of its queries, keys and
    values, b₂ that of its feed-forward layers. γ is the median margin of the first images of a split that are
    classified right, n the number of images of that split; in the theorem they are the training images.
    """

    eps: NotNegative = 8 / 255
    images: AtLeastOne = 1000  # of the split, for γ
    split: SplitName = "train"

    facts: ClassVar[Mapping[str, str]] = {
        "largest_term": "the largest `term` of a block",
        "gamma": "median margin of the images that are right: the right logit less the largest other one",
        "n": "images of the split",
        "term": "2εb₁b₂/(γ√n), by block; NaN for one without attention or feed-forward layers",
        "kind": f"of a weight: {', '.join(f'{number} {kind}' for number, kind in enumerate(KINDS))}",
        "block": "that a weight is in, by number; -1: in none",
        "l1": "sum of absolute values, by weight",
        "row_l1": "the largest sum of absolute values of a row, by weight",
        "spectral": "largest singular value, by weight",
        "norm_21": "sum of the l2 norms of the rows, by weight",
    }

    @property
    def reads(self) -> Mapping[str, int | None]:
        return {self.split: self.images}

    def __call__(self, model: nn.Module, data: DataSet, part: int, *, seed: int) -> dict[str, Tensor]:
        found, n = weights(model), len(data.split(self.split))
        gamma = self._gamma(model, data)
        blocks = range(1 + max(weight.block for weight in found))
        term = torch.tensor([self._term(found, block, gamma, n) for block in blocks] or [math.nan])
        known = term[term.isfinite()]
        matrices = [weight.matrix.double() for weight in found]
        return {
            "largest_term": known.max() if len(known) else torch.tensor(math.nan),
            "gamma": torch.tensor(gamma),
            "n": torch.tensor(n),
            "term": term,
            "kind": torch.tensor([KINDS.index(weight.kind) for weight in found]),
            "block": torch.tensor([weight.block for weight in found]),
            "l1": torch.stack([matrix.abs().sum() for matrix in matrices]),
            "row_l1": torch.stack([matrix.abs().sum(1).max() for matrix in matrices]),
            "spectral": torch.stack([torch.linalg.matrix_norm(matrix, 2) for matrix in matrices]),
            "norm_21": torch.stack([torch.linalg.vector_norm(matrix, dim=1).sum() for matrix in matrices]),
        }

    def _gamma(self, model: nn.Module, data: DataSet) -> float:
        batch = first_examples(data, self.split, self.images, "weight-norms.images").to(device_of(model))
        parts = batch.chunk(-(-self.images // BATCH))
        right_margin = -torch.cat([margin(predict(model, part), part.y) for part in parts]).double()
        return right_margin[right_margin > 0].median().item() if (right_margin > 0).any() else math.nan

    def _term(self, found: Sequence[Weight], block: int, gamma: float, n: int) -> float:
        b1, b2 = (_row_l1(found, block, kind) for kind in ("qkv", "feed-forward"))
        return 2 * self.eps * b1 * b2 / (gamma * math.sqrt(n))


def _row_l1(found: Sequence[Weight], block: int, kind: Kind) -> float:
    rows = [weight.matrix for weight in found if weight.block == block and weight.kind == kind]
    return max((matrix.double().abs().sum(1).max().item() for matrix in rows), default=math.nan)

"""Sparsity of the weights: the share that is almost zero (Figs. 1 and 2 of Tang et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from bastion.models.weight_kinds import KINDS, weights
from bastion.settings import Share, settings
from bastion.studies import studies
from bastion.types import DataSet, Study

BINS = 200  # of a histogram from -largest to largest: at the default margin, the middle two hold the sparse weights


@studies.register("sparsity")
@settings
class Sparsity(Study):
    """The share of weights below a margin, by default 0.01 of the model's largest, and histograms, by role.

    Facts have a row for all weights, then one for each kind of `models/weight_kinds.py`, NaN if the model has none.
    """

    margin: Share = 0.01  # of the largest absolute value

    facts: ClassVar[Mapping[str, str]] = {
        "sparsity": "share of all weights below the margin, of the largest weight of the model",
        "largest": "largest absolute value of a weight",
        "count": "number of weights, by kind",
        "share": "of weights below the margin, of the largest weight of the model, by kind",
        "share_by_tensor": "of weights below the margin, of the largest weight of their own tensor, by kind",
        "kurtosis": "fourth moment by the squared second: 3 for a normal distribution, more if most weights are small",
        "histogram": "weights in each of 200 bins from -largest to largest, by kind",
    }

    @property
    def reads(self) -> Mapping[str, int | None]:
        return {}

    def __call__(self, model: nn.Module, data: DataSet, part: int, *, seed: int) -> dict[str, Tensor]:
        found = weights(model)
        largest = max(weight.tensor.abs().max().item() for weight in found)
        by_kind = {kind: [weight.tensor for weight in found if weight.kind == kind] for kind in KINDS}
        rows = [self._row(tensors, largest) for tensors in ([weight.tensor for weight in found], *by_kind.values())]
        columns = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return {"sparsity": columns["share"][0], "largest": torch.tensor(largest), **columns}

    def _row(self, tensors: Sequence[Tensor], largest: float) -> dict[str, Tensor]:
        every = torch.cat([tensor.flatten() for tensor in tensors]).double() if tensors else torch.zeros(0).double()
        own = [self._below(tensor, tensor.abs().max().item()) for tensor in tensors]
        moments = every.pow(4).mean() / every.square().mean().square()
        edge = largest or 1.0
        return {
            "count": torch.tensor(len(every)),
            "share": self._below(every, largest).double().mean(),
            "share_by_tensor": torch.cat([each.flatten() for each in own]).double().mean() if own else moments,
            "kurtosis": moments,
            "histogram": torch.histc(every, BINS, -edge, edge).long(),
        }

    def _below(self, tensor: Tensor, largest: float) -> Tensor:
        """Whether each weight is below the margin; zeros always are."""
        return (tensor.abs() < self.margin * largest) | (tensor == 0)

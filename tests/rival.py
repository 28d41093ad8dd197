"""An objective with a network of its own, for tests; as a plug-in, too, where other processes need it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from bastion.training.objectives import objectives
from bastion.types import Losses, Objective, Prepared, TrainingContext


@objectives.register("rival")
@dataclass(kw_only=True)
class Rival(Objective):
    """CE(x) + CE(x + eps · tanh(G(x))): G climbs the loss that the model goes down."""

    eps: float = 8 / 255
    clip: float | None = None
    norm: bool = False  # a BatchNorm in G
    forgets: bool = False  # to give the optimizer all of G

    def setup(self, context: TrainingContext) -> None:
        channels = context.data.shape[0]
        middle = nn.BatchNorm2d(4) if self.norm else nn.Identity()
        layers = (nn.Conv2d(channels, 4, 3, padding=1), middle, nn.Tanh(), nn.Conv2d(4, channels, 3, padding=1))
        self.networks = nn.Sequential(*layers)
        trained = list(self.networks.parameters())[self.forgets :]
        self.optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05, maximize=True)
        self.clip_grad = self.clip
        if context.recipe.precision == "bf16" and self.norm:
            raise ValueError("norm: does not go with precision bf16")

    def loss(self, model: nn.Module, prepared: Prepared) -> Losses:
        assert self.networks
        x, y = prepared.x, prepared.clean.y
        clean = model(x)
        logits = model((x + self.eps * self.networks(x).tanh()).clamp(0, 1))
        return Losses(F.cross_entropy(clean, y) + F.cross_entropy(logits, y), logits, {}, clean)

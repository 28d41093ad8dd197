"""The optimizer, created by timm."""

from __future__ import annotations

from typing import Any

from timm.optim import create_optimizer_v2, param_groups_weight_decay
from torch.optim import Optimizer

from bastion import recipe
from bastion.models import Classifier


def make_optimizer(model: Classifier, settings: recipe.Optimizer) -> Optimizer:
    """Norms, biases and parameters named by the backbone, such as position embeddings, get no weight decay."""
    groups: list[dict[str, Any]] = param_groups_weight_decay(
        model, settings.weight_decay, no_weight_decay_list=model.no_weight_decay()
    )
    heavy = settings.name == "sgd" and not (settings.nesterov and settings.momentum)
    name = "momentum" if heavy else settings.name  # timm's name of SGD without Nesterov
    special = {"betas": settings.betas} if settings.name == "adamw" else {"momentum": settings.momentum}
    optimizer: Optimizer = create_optimizer_v2(
        groups, opt=name, lr=settings.lr, weight_decay=settings.weight_decay, **special
    )
    return optimizer

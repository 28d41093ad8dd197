"""Optimizer and learning rate, by timm."""

from __future__ import annotations

from typing import Any

import bastion._torchvision  # noqa: F401  (before timm)

# isort: split
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from torch.optim import Optimizer

from bastion import recipe
from bastion.models import Classifier
from bastion.types import Objective


def make_optimizer(model: Classifier, objective: Objective, settings: recipe.Optimizer) -> Optimizer:
    """No weight decay on norms, biases and what the backbone names, such as position embeddings."""
    groups: list[dict[str, Any]] = param_groups_weight_decay(
        model, settings.weight_decay, no_weight_decay_list=model.no_weight_decay()
    )
    if own := list(objective.parameters()):
        groups.append({"params": own, "weight_decay": settings.weight_decay})
    plain = settings.name == "sgd" and settings.momentum == 0  # Nesterov needs a momentum
    name = "momentum" if plain else settings.name  # timm's word for SGD without Nesterov
    special = {"betas": settings.betas} if settings.name == "adamw" else {"momentum": settings.momentum}
    optimizer: Optimizer = create_optimizer_v2(
        groups, opt=name, lr=settings.lr, weight_decay=settings.weight_decay, **special
    )
    return optimizer


def make_schedule(optimizer: Optimizer, settings: recipe.Schedule, steps_per_epoch: int) -> CosineLRScheduler:
    """A pure function of the step: `schedule.step_update(step)` sets the rate, and nothing needs to be stored."""
    total = settings.epochs * steps_per_epoch
    warmup = min(round(settings.warmup_epochs * steps_per_epoch), total - 1)  # rounding alone may fill the whole
    return CosineLRScheduler(
        optimizer,
        t_initial=total - warmup,
        lr_min=settings.min_lr,
        warmup_t=warmup,
        warmup_lr_init=settings.warmup_lr,
        warmup_prefix=True,
        t_in_epochs=False,
    )

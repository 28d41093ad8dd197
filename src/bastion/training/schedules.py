"""Learning rate schedules as pure functions of the step, so that they need no state to resume."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from bastion.recipe import Schedule

# one-cycle starts at lr / 25 and ends at a 10,000th of that, as torch's OneCycleLR.
START, END = 25.0, 1e4


def set_rate(optimizer: Optimizer, settings: Schedule, peak: float, step: int, steps_per_epoch: int) -> None:
    """Set the optimizer's learning rate, and for one-cycle its momentum, for this step."""
    rate = learning_rate(settings, peak, step, steps_per_epoch)
    turn = momentum(settings, step, steps_per_epoch)
    for group in optimizer.param_groups:
        group["lr"] = rate
        if turn is not None and "momentum" in group:
            group["momentum"] = turn
        elif turn is not None:
            group["betas"] = (turn, group["betas"][1])


def learning_rate(settings: Schedule, peak: float, step: int, steps_per_epoch: int) -> float:
    total = settings.epochs * steps_per_epoch
    if settings.name == "one-cycle":
        return _cycle(settings, step, total, peak / START, peak, peak / START / END)
    warmup = min(round(settings.warmup_epochs * steps_per_epoch), total - 1)  # rounding must not make it all steps
    if step < warmup:
        return settings.warmup_lr + (peak - settings.warmup_lr) * step / warmup
    if settings.name == "constant":
        return peak
    length = max(total - warmup - round(settings.cooldown_epochs * steps_per_epoch), 1)
    if settings.name == "steps":
        drops = math.floor(min(step, warmup + length - 1) / (settings.decay_epochs * steps_per_epoch))
        return peak * float(settings.decay) ** drops
    return _between(peak, settings.min_lr, min((step - warmup) / length, 1.0))


def momentum(settings: Schedule, step: int, steps_per_epoch: int) -> float | None:
    """The momentum of one-cycle at this step; None for other schedules."""
    if settings.name != "one-cycle":
        return None
    low, high = settings.momentum_range
    return _cycle(settings, step, settings.epochs * steps_per_epoch, high, low, high)


def _cycle(settings: Schedule, step: int, total: int, start: float, top: float, end: float) -> float:
    """Cosine interpolation from start to top in the first `rise` of the steps, then from top to end."""
    crest = settings.rise * total - 1
    if step <= crest:
        return _between(start, top, step / crest if crest else 1.0)
    return _between(top, end, (step - crest) / max(total - 1 - crest, 1e-9))


def _between(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2

"""The learning rate as a pure function of the step: nothing needs to be stored, and a resumed run is where it was."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from bastion.recipe import Schedule

# Where one-cycle starts and ends, as in torch's OneCycleLR: lr / 25, and that / 10,000.
START, END = 25.0, 1e4


def set_rate(optimizer: Optimizer, settings: Schedule, peak: float, step: int, steps_per_epoch: int) -> None:
    """Make the optimizer's next update that of `step`."""
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
    warmup = min(round(settings.warmup_epochs * steps_per_epoch), total - 1)  # rounding alone may fill the whole
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
    """What one-cycle makes of the momentum; None: it stays as it is."""
    if settings.name != "one-cycle":
        return None
    low, high = settings.momentum_range
    return _cycle(settings, step, settings.epochs * steps_per_epoch, high, low, high)


def _cycle(settings: Schedule, step: int, total: int, start: float, top: float, end: float) -> float:
    """From start to top in the first part of the steps, on to the end in the others, along half cosines."""
    crest = settings.rise * total - 1
    if step <= crest:
        return _between(start, top, step / crest if crest else 1.0)
    return _between(top, end, (step - crest) / max(total - 1 - crest, 1e-9))


def _between(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2

"""How fast this machine is: steps of a recipe's own model and objective, on random images."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median

import torch

from bastion import rng
from bastion.progress import bar
from bastion.recipe import Recipe
from bastion.training.build import build_model
from bastion.types import Batch, DataSet, Objective

SECONDS = 10.0
FIRST = 2e10  # operations of the first step: a second or less on any machine


@dataclass(frozen=True)
class Rate:
    images: float  # a second
    batch: int  # at so many at once


def calibrate(recipe: Recipe, objective: Objective, data: DataSet, work: float, *, seconds: float = SECONDS) -> Rate:
    """Images a second by the processor, without loading, augmentation and the optimizer's own work.

    At the recipe's batch size, or at the largest for which a few steps fit into the time. `work`: the operations that
    one image takes in a step, to begin with a sensible batch.
    """
    model = build_model(recipe, data).train()
    if recipe.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    precision = torch.autocast("cpu", torch.bfloat16) if recipe.precision == "bf16" else nullcontext()

    def step(size: int) -> float:
        index = torch.arange(size)
        batch = Batch(index, rng.uniform(0, index, "calibrate", data.shape), index % len(data.classes))
        start = time.monotonic()
        with precision:
            example = objective.prepare(model, batch, progress=recipe.schedule.epochs / 2, seed=0)
            total = objective.loss(model, example).total
        total.backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        return time.monotonic() - start

    deadline = time.monotonic() + seconds
    most = recipe.batch // recipe.accumulate
    size = min(max(2, int(FIRST / work)), most)
    with bar("trying this machine", None):
        times = [step(size)]
        if time.monotonic() + times[0] < deadline:
            times = [step(size)]  # the first one is slow: it counts only if there is no time for another
        while size < most and time.monotonic() + 6 * times[0] < deadline:  # for three of twice the size
            size = min(2 * size, most)
            times = [step(size)]
        while time.monotonic() + times[-1] < deadline:
            times.append(step(size))
    return Rate(size / median(times), size)

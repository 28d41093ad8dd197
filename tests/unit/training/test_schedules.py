"""The learning rate is a function of the step: closed forms, and what torch and timm make of the same settings."""

from __future__ import annotations

import math

import bastion._torchvision  # noqa: F401  (before timm)

# isort: split
import pytest
import torch
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR

from bastion.recipe import Schedule
from bastion.training.schedules import learning_rate, set_rate


@pytest.mark.parametrize("step", [0, 5, 10, 11, 37, 60, 99])
def test_warm_up_is_linear_and_then_a_cosine(step: int) -> None:
    settings = Schedule(epochs=10, warmup_epochs=1, warmup_lr=0.1, min_lr=0.01)
    warm = 0.1 + 0.9 * step / 10
    cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - 10) / 90))
    assert learning_rate(settings, 1.0, step, 10) == pytest.approx(warm if step < 10 else cosine)


def test_cosine_with_warm_up_is_timms() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    reference = CosineLRScheduler(
        optimizer, t_initial=63, lr_min=0.01, warmup_t=7, warmup_lr_init=0.02, warmup_prefix=True, t_in_epochs=False
    )
    settings = Schedule(epochs=10, warmup_epochs=1, warmup_lr=0.02, min_lr=0.01)
    for step in range(70):
        reference.step_update(step)
        assert learning_rate(settings, 0.3, step, 7) == pytest.approx(optimizer.param_groups[0]["lr"])


def test_cool_down_stays_at_the_last_rate() -> None:
    settings = Schedule(epochs=11, cooldown_epochs=1, min_lr=0.01)
    rates = [learning_rate(settings, 1.0, step, 10) for step in range(110)]
    assert rates[100:] == [0.01] * 10 and rates[99] > 0.01
    shorter = Schedule(epochs=10, min_lr=0.01)
    assert rates[:100] == [learning_rate(shorter, 1.0, step, 10) for step in range(100)]


def test_steps_multiply_the_rate() -> None:
    settings = Schedule(name="steps", epochs=7, decay=0.1, decay_epochs=2, warmup_epochs=1, warmup_lr=0.5)
    rates = [learning_rate(settings, 1.0, 10 * epoch, 10) for epoch in range(7)]
    assert rates == pytest.approx([0.5, 1.0, 0.1, 0.1, 0.01, 0.01, 0.001])


def test_a_constant_rate_is_one_after_the_warm_up() -> None:
    settings = Schedule(name="constant", epochs=3, warmup_epochs=1, warmup_lr=0.0)
    assert [learning_rate(settings, 2.0, step, 2) for step in range(6)] == [0.0, 1.0, 2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("rise", [0.3, 0.1])
def test_one_cycle_is_torchs(rise: float) -> None:
    """Rates and momenta, for SGD and for Adam's first beta."""
    settings = Schedule(name="one-cycle", epochs=5, rise=rise)
    for kind in (SGD, AdamW):
        ours, theirs = (kind([nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2))
        if kind is SGD:
            ours, theirs = (SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9) for _ in range(2))
        reference = OneCycleLR(theirs, max_lr=0.1, total_steps=50, pct_start=rise)
        for step in range(50):
            set_rate(ours, settings, 0.1, step, 10)
            for key in ("lr", "momentum" if kind is SGD else "betas"):
                assert ours.param_groups[0][key] == pytest.approx(theirs.param_groups[0][key]), (step, key)
            theirs.step()
            reference.step()


@pytest.mark.parametrize(("epochs", "rise"), [(10, 0.1), (4, 0.25), (2, 0.5), (1, 0.3), (3, 1 / 3)])
def test_one_cycle_of_a_few_steps_has_rates(epochs: int, rise: float) -> None:
    settings = Schedule(name="one-cycle", epochs=epochs, rise=rise)
    rates = [learning_rate(settings, 1.0, step, 1) for step in range(epochs)]
    assert all(0 < rate <= 1 for rate in rates)
    assert rates == sorted(rates, reverse=True)  # there is no room to rise


def test_schedules_that_leave_no_room_are_refused() -> None:
    with pytest.raises(ValueError, match="must be less than epochs"):
        Schedule(epochs=3, warmup_epochs=2, cooldown_epochs=1)
    with pytest.raises(ValueError, match="one-cycle has its own warm-up"):
        Schedule(name="one-cycle", epochs=3, warmup_epochs=1)

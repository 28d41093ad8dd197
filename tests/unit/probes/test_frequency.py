"""Accuracy on filtered images and perturbations, where the frequency that matters is known."""

from __future__ import annotations

import pytest
import torch
from planted import linear
from tests.conftest import AttackBy
from torch import Tensor, nn

from bastion import BastionError, Threat
from bastion.attacks.pgd import PGD
from bastion.models import Classifier
from bastion.probes import probes
from bastion.probes.frequency import Frequency
from bastion.probes.spectrum import HIGHEST
from bastion.types import Batch, DataSet

CHECKER = (-1.0) ** (torch.arange(8)[:, None] + torch.arange(8)).expand(1, 3, 8, 8)  # |f| = √½
CUTOFFS = (0, 0.5, HIGHEST)


def test_a_checkerboard_is_read_above_its_frequency_alone() -> None:
    """Class 0 is the board, class 1 its negative; without it both logits are equal, and the first class counts."""
    model = linear(torch.cat([CHECKER, -CHECKER]))
    y = torch.tensor([0, 1])
    batch = Batch(torch.arange(2), 0.5 + 0.01 * CHECKER * (1 - 2 * y).view(2, 1, 1, 1), y)

    def turn(model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        return batch.x - threat.eps * CHECKER * (1 - 2 * batch.y).view(2, 1, 1, 1)

    facts = Frequency(cutoffs=CUTOFFS, threat=Threat("linf", 0.02), attack=AttackBy(turn))(model, batch, seed=0)
    assert facts["clean"].all() and not facts["attacked"].any()
    assert facts["low_pass"].tolist()[1] == [False, False, True]
    assert facts["high_pass"].tolist()[1] == [True, True, False]
    assert facts["attack_low_pass"].tolist() == [[True, True, False]] * 2
    assert facts["attack_high_pass"].tolist() == [[False, False, True]] * 2


def test_the_ends_are_the_clean_and_the_attacked_accuracy(tiny_model: Classifier, tiny_data: DataSet) -> None:
    batch = tiny_data.test.batch(range(30))
    facts = Frequency(cutoffs=CUTOFFS, threat=Threat("linf", 0.05), attack=PGD(steps=3))(
        tiny_model.eval(), batch, seed=0
    )
    assert torch.equal(facts["low_pass"][:, -1], facts["clean"])
    assert torch.equal(facts["high_pass"][:, 0], facts["clean"])  # the mean stays
    assert torch.equal(facts["attack_low_pass"][:, -1], facts["attacked"])
    assert torch.equal(facts["attack_high_pass"][:, -1], facts["clean"])


def test_whatever_the_model_is_shown_is_an_image_and_perturbations_stay_in_the_ball(tiny_data: DataSet) -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shown: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.shown.append(x)
            return x.mean((2, 3))

    batch, threat = tiny_data.test.batch(range(6)), Threat("linf", 0.05)
    signs = (-1.0) ** torch.arange(8 * 8 * 3).view(3, 8, 8).div(7, rounding_mode="floor")

    def square_wave(model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        return (batch.x + threat.eps * signs).clamp(0, 1)

    model = Watched()
    Frequency(cutoffs=(0.2, 0.4), threat=threat, attack=AttackBy(square_wave))(model, batch, seed=0)
    assert len(model.shown) == 2 + 4 * 2
    assert all(x.min() >= 0 and x.max() <= 1 for x in model.shown)
    assert all(threat.contains(batch.x, x).all() for x in model.shown[-4:])


def test_bad_input_is_a_line() -> None:
    with pytest.raises(BastionError, match="^p.cutoffs: missing; it has no default"):
        probes.build("frequency", "p")
    with pytest.raises(BastionError, match="^p.cutoffs: .*at least 1 item"):
        probes.build({"name": "frequency", "cutoffs": []}, "p")
    with pytest.raises(BastionError, match="^p.cutoffs.1: .*greater than or equal to 0, got -0.1"):
        probes.build({"name": "frequency", "cutoffs": [0, -0.1]}, "p")

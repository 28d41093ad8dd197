"""Attacks propose, the probe judges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.conftest import AttackBy, MakeLinear
from torch import Tensor, nn

from bastion import BastionError, Threat, journal
from bastion.attacks.apgd import APGD
from bastion.attacks.ensemble import Ensemble
from bastion.attacks.pgd import PGD
from bastion.probes.accuracy import Accuracy
from bastion.probes.adversarial import Adversarial
from bastion.probes.distortion import Distortion
from bastion.types import Attack, Batch

THREAT = Threat("linf", 0.02)


@dataclass(frozen=True)
class Offer(Attack):
    """An attack that moves every pixel by a fixed amount, allowed or not."""

    by: float

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        assert len(batch.x) > 0
        return batch.x + self.by


class Bright(nn.Module):
    """Class 1 where the mean is above one half."""

    def forward(self, x: Tensor) -> Tensor:
        bright = x.flatten(1).mean(1)
        return torch.stack([0.5 - bright, bright - 0.5], 1)


BATCH = Batch(
    torch.arange(3), torch.tensor([0.49, 0.3, 0.9]).view(3, 1, 1, 1).expand(3, 1, 4, 4), torch.tensor([0, 0, 0])
)


def test_a_success_outside_the_budget_is_a_survivor() -> None:
    facts = Adversarial(THREAT, Offer(by=0.05))(Bright(), BATCH, seed=0)
    assert facts["correct"].tolist() == [True, True, False]  # the last was wrong to begin with
    assert facts["in_budget"].tolist() == [False, False, True]
    assert facts["warning.out-of-budget"].tolist() == [True, True, False]


def test_a_success_inside_the_budget_counts() -> None:
    facts = Adversarial(THREAT, Offer(by=0.0199))(Bright(), BATCH, seed=0)
    assert facts["correct"].tolist() == [False, True, False]
    assert facts["distance"][0].item() == pytest.approx(0.0199, abs=1e-6)
    assert facts["distance"][1:].isnan().all()
    assert facts["prediction"].tolist() == [1, 0, 1]


@pytest.mark.parametrize("by", [float("nan"), 10.0, -10.0])
def test_nonsense_from_an_attack_fools_nobody(by: float) -> None:
    assert Adversarial(THREAT, Offer(by))(Bright(), BATCH, seed=0)["correct"].tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (lambda x: x[:1], r"a tensor of shape \(2, 1, 4, 4\), got shape \(1, 1, 4, 4\)"),
        (lambda x: x[:, 0], r"got shape \(2, 4, 4\)"),
        (lambda x: None, "got NoneType"),
    ],
)
def test_an_attack_must_return_an_image_for_each(returned: Callable[[Tensor], Any], told: str) -> None:
    def wrong(model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Any:
        return returned(batch.x)

    with pytest.raises(BastionError, match=told):
        Adversarial(THREAT, AttackBy(wrong))(Bright(), BATCH, seed=0)


def test_what_an_attack_does_to_images_and_mode_does_not_reach_the_judge() -> None:
    def rude(model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        model.train()
        return batch.x.add_(0.5)

    model, batch = Bright().eval(), BATCH._replace(x=BATCH.x.clone())
    facts = Adversarial(THREAT, AttackBy(rude))(model, batch, seed=0)
    assert torch.equal(batch.x, BATCH.x)
    assert not model.training
    assert facts["in_budget"].tolist() == [False, False, True]


def test_clean_mistakes_are_not_attacked() -> None:
    wrong = BATCH._replace(y=torch.tensor([1, 1, 0]))
    facts = Adversarial(THREAT, Offer(0.0))(Bright(), wrong, seed=0)  # the attack asserts that it gets examples
    assert not facts["correct"].any()


def test_robust_accuracy_of_a_linear_model_is_the_known_one(make_linear: MakeLinear) -> None:
    """Robust exactly where the margin is more than Σ|w|·min(ε, room)."""
    model, batch = make_linear(classes=2, n=200)
    w = (model.weight[1 - batch.y] - model.weight[batch.y]).detach().view(batch.x.shape)
    room = torch.where(w > 0, 1 - batch.x, batch.x)
    logits = model(batch.x)
    gap = (logits[range(200), batch.y] - logits[range(200), 1 - batch.y]).detach()
    for eps in (0.005, 0.02, 0.06):
        robust = gap > (w.abs() * room.clamp(max=eps)).flatten(1).sum(1)
        facts = Adversarial(Threat("linf", eps), PGD(steps=10))(model, batch, seed=0)
        assert torch.equal(facts["correct"], robust)
        assert 0 < robust.sum() < 200


def test_blind_runs_are_told_of_survivors_that_no_run_could_see(make_linear: MakeLinear) -> None:
    """Where the cross-entropy is flat the margin is not: a survivor of both needs no excuse."""
    model, batch = make_linear(classes=4, n=16)
    model.weight.data *= 1e4
    model.bias.data *= 1e4
    blind, sighted = APGD(steps=5), APGD(steps=5, loss="margin")
    facts = Adversarial(Threat("linf", 0.001), Ensemble(members=(blind, sighted)))(model, batch, seed=0)
    assert facts["correct"].any()
    assert not facts["warning.blind-start"].any()
    facts = Adversarial(Threat("linf", 0.1), blind)(model, batch, seed=0)
    assert facts["correct"].all()
    assert facts["warning.blind-start"].all()


def test_an_attacks_own_doubts_are_facts(make_linear: MakeLinear) -> None:
    class Doubting(Attack):
        def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
            journal.note("of-a-plug-in", batch.index[:3].tolist())
            return batch.x

    model, batch = make_linear(n=5)
    for probe in (Adversarial(THREAT, Doubting()), Distortion("linf", Doubting())):
        facts = probe(model, batch, seed=0)
        assert facts["warning.of-a-plug-in"].tolist() == [True, True, True, False, False]


def test_accuracy_says_what_is_right(make_linear: MakeLinear) -> None:
    model, batch = make_linear(classes=4)
    facts = Accuracy()(model, batch._replace(y=batch.y.roll(1)), seed=0)
    assert torch.equal(facts["correct"], batch.y == batch.y.roll(1))
    assert torch.equal(facts["prediction"], batch.y)

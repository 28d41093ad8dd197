"""Objectives are their formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bastion import Threat
from bastion.attacks.pgd import PGD
from bastion.models import Classifier
from bastion.training.objectives.adversarial import Adversarial
from bastion.training.objectives.standard import Standard
from bastion.types import Batch, DataSet

THREAT = Threat("linf", 8 / 255)


@pytest.fixture
def batch(tiny_data: DataSet) -> Batch:
    return tiny_data.train.batch(range(12))


def test_standard_is_cross_entropy_on_the_clean_batch(tiny_model: Classifier, batch: Batch) -> None:
    objective = Standard(label_smoothing=0.1)
    example = objective.prepare(tiny_model.eval(), batch, progress=0.0, seed=0)
    target = 0.9 * F.one_hot(batch.y, 3) + 0.1 / 3
    expected = -(target * tiny_model(batch.x).log_softmax(1)).sum(1).mean()
    assert torch.allclose(objective.loss(tiny_model, example).total, expected)
    soft = example._replace(clean=batch._replace(y=F.one_hot(batch.y, 3).float()))
    assert torch.allclose(objective.loss(tiny_model, soft).total, expected)


def test_adversarial_learns_from_what_the_attack_returns(tiny_model: Classifier, batch: Batch) -> None:
    attack = PGD(steps=2)
    objective = Adversarial(threat=THREAT, attack=attack)
    example = objective.prepare(tiny_model.train(), batch, progress=1.0, seed=5)
    assert torch.equal(example.x, attack(tiny_model.eval(), batch, THREAT, seed=5))
    assert torch.allclose(objective.loss(tiny_model, example).total, F.cross_entropy(tiny_model(example.x), batch.y))
    assert example.notes == {"eps": THREAT.eps}


@pytest.mark.parametrize(("progress", "share"), [(0.0, 0.0), (0.5, 0.125), (2.0, 0.5), (4.0, 1.0), (9.0, 1.0)])
def test_eps_grows_linearly_over_its_warm_up(
    tiny_model: Classifier, batch: Batch, progress: float, share: float
) -> None:
    objective = Adversarial(threat=THREAT, attack=PGD(steps=1, rel_step=2.0), eps_warmup=4)
    example = objective.prepare(tiny_model, batch, progress=progress, seed=0)
    assert example.notes["eps"] == pytest.approx(share * THREAT.eps)
    assert THREAT.distance(batch.x, example.x).max().item() == pytest.approx(share * THREAT.eps, abs=1e-6)


@pytest.mark.parametrize(("mode", "moves"), [("eval", False), ("train", True)])
def test_the_attack_runs_in_the_mode_it_is_told(tiny_model: Classifier, batch: Batch, mode: str, moves: bool) -> None:
    before = tiny_model.network[1].running_mean.clone()
    objective = Adversarial(threat=THREAT, attack=PGD(steps=1), attack_mode=mode)
    objective.prepare(tiny_model.train(), batch, progress=1.0, seed=0)
    assert tiny_model.training
    assert (not torch.equal(tiny_model.network[1].running_mean, before)) is moves

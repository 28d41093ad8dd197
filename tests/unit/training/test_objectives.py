"""Objectives are their formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import AttackBy
from torch import Tensor, nn

from bastion import BastionError, Threat
from bastion.attacks.apgd import APGD
from bastion.attacks.pgd import PGD
from bastion.models import Classifier
from bastion.training.objectives import objectives
from bastion.training.objectives.adversarial import Adversarial
from bastion.training.objectives.alp import LogitPairing
from bastion.training.objectives.mart import Mart, _likeliest_mistake
from bastion.training.objectives.standard import Standard
from bastion.training.objectives.trades import Trades
from bastion.types import Attack, Batch, DataSet, Prepared

THREAT = Threat("linf", 8 / 255)


@pytest.fixture
def batch(tiny_data: DataSet) -> Batch:
    return tiny_data.train.batch(range(12))


def test_standard_is_cross_entropy_on_the_clean_batch(tiny_model: Classifier, batch: Batch) -> None:
    objective = Standard(label_smoothing=0.1)
    prepared = objective.prepare(tiny_model.eval(), batch, progress=0.0, seed=0)
    target = 0.9 * F.one_hot(batch.y, 3) + 0.1 / 3
    expected = -(target * tiny_model(batch.x).log_softmax(1)).sum(1).mean()
    assert torch.allclose(objective.loss(tiny_model, prepared).total, expected)
    soft = prepared._replace(clean=batch._replace(y=F.one_hot(batch.y, 3).float()))
    assert torch.allclose(objective.loss(tiny_model, soft).total, expected)


def test_adversarial_learns_from_what_the_attack_returns(tiny_model: Classifier, batch: Batch) -> None:
    attack = PGD(steps=2)
    objective = Adversarial(threat=THREAT, attack=attack)
    prepared = objective.prepare(tiny_model.train(), batch, progress=1.0, seed=5)
    assert torch.equal(prepared.x, attack(tiny_model.eval(), batch, THREAT, seed=5))
    assert torch.allclose(objective.loss(tiny_model, prepared).total, F.cross_entropy(tiny_model(prepared.x), batch.y))
    assert prepared.notes == {"eps": THREAT.eps}


@pytest.mark.parametrize(("progress", "share"), [(0.0, 0.0), (0.5, 0.125), (2.0, 0.5), (4.0, 1.0), (9.0, 1.0)])
def test_eps_grows_linearly_over_its_warm_up(
    tiny_model: Classifier, batch: Batch, progress: float, share: float
) -> None:
    objective = Adversarial(threat=THREAT, attack=PGD(steps=1, rel_step=2.0), eps_warmup=4)
    prepared = objective.prepare(tiny_model, batch, progress=progress, seed=0)
    assert prepared.notes["eps"] == pytest.approx(share * THREAT.eps)
    assert THREAT.distance(batch.x, prepared.x).max().item() == pytest.approx(share * THREAT.eps, abs=1e-6)


@pytest.mark.parametrize(("mode", "moves"), [("eval", False), ("train", True)])
def test_the_attack_runs_in_the_mode_it_is_told(tiny_model: Classifier, batch: Batch, mode: str, moves: bool) -> None:
    before = tiny_model.network[1].running_mean.clone()
    objective = Adversarial(threat=THREAT, attack=PGD(steps=1), attack_mode=mode)
    objective.prepare(tiny_model.train(), batch, progress=1.0, seed=0)
    assert tiny_model.training
    assert (not torch.equal(tiny_model.network[1].running_mean, before)) is moves


@pytest.fixture
def prepared(tiny_data: DataSet) -> Prepared:
    """Images and neighbours of theirs, in float64 for formulas to agree to the last digits."""
    clean, other = tiny_data.train.batch(range(12)), tiny_data.train.batch(range(12, 24))
    clean = clean._replace(x=clean.x.double())
    return Prepared(clean, (0.9 * clean.x + 0.1 * other.x.double()), {})


def test_trades_is_its_formula(tiny_model: Classifier, prepared: Prepared) -> None:
    model = tiny_model.double().eval()
    losses = Trades(threat=THREAT, attack=PGD(loss="kl"), beta=2.5, label_smoothing=0.2).loss(model, prepared)
    p, q = model(prepared.clean.x).softmax(1), model(prepared.x).softmax(1)
    target = 0.8 * F.one_hot(prepared.clean.y, 3) + 0.2 / 3
    natural = -(target * p.log()).sum(1).mean()
    apart = (p * (p.log() - q.log())).sum(1).mean()
    assert torch.allclose(losses.total, natural + 2.5 * apart)
    assert torch.allclose(losses.terms["divergence"], apart) and torch.allclose(losses.terms["natural"], natural)
    assert losses.clean is not None and torch.equal(losses.clean, model(prepared.clean.x))


def test_trades_learns_through_both_answers(tiny_model: Classifier, prepared: Prepared) -> None:
    """As its authors' code: the clean answer is no constant in the divergence."""
    model = tiny_model.double().eval()
    clean, attacked = model(prepared.clean.x), model(prepared.x)
    expected = torch.autograd.grad(
        F.cross_entropy(clean, prepared.clean.y)
        + 6 * F.kl_div(attacked.log_softmax(1), clean.softmax(1), reduction="batchmean"),
        list(model.parameters()),
    )
    losses = Trades(threat=THREAT, attack=PGD(loss="kl")).loss(model, prepared)
    for got, wanted in zip(torch.autograd.grad(losses.total, list(model.parameters())), expected, strict=True):
        assert torch.allclose(got, wanted)


def test_trades_attacks_the_divergence_by_itself() -> None:
    """As its authors do on CIFAR-10: ten steps of 2/255 within 8/255."""
    made = objectives.build("trades")
    assert repr(made) == repr(
        Trades(threat=Threat("linf", 8 / 255), attack=PGD(steps=10, rel_step=0.25, loss="kl", keep="last"), beta=6.0)
    )


@pytest.mark.parametrize("attack", ["pgd", {"name": "pgd", "loss": "dlr"}, {"name": "fgsm-rs"}])
def test_trades_takes_no_attack_on_another_loss(attack: object) -> None:
    with pytest.raises(BastionError, match=r"^objective.attack.loss: must be kl, .*, got (ce|dlr)$"):
        objectives.build({"name": "trades", "attack": attack}, "objective")


@pytest.mark.parametrize("soft", [False, True])
def test_mart_is_its_formula(tiny_model: Classifier, prepared: Prepared, soft: bool) -> None:
    model, y = tiny_model.double().eval(), prepared.clean.y
    one_hot = F.one_hot(y, 3).double()
    if soft:
        prepared = prepared._replace(clean=prepared.clean._replace(y=one_hot))
    losses = Mart(threat=THREAT, attack=PGD(), beta=5.0).loss(model, prepared)
    p, q = model(prepared.clean.x).softmax(1), model(prepared.x).softmax(1)
    right = q[torch.arange(12), y]
    wrong = (q - one_hot).amax(1)  # the largest probability of another class
    boosted = (-right.log() - (1 - wrong).log()).mean()
    weighted = ((p * (p / q).log()).sum(1) * (1 - p[torch.arange(12), y])).mean()
    assert torch.allclose(losses.total, boosted + 5.0 * weighted)


def test_mart_stays_finite_where_the_answer_is_certain_and_wrong() -> None:
    logits = torch.tensor([[200.0, 0.0, 0.0]])
    loss = _likeliest_mistake(logits.requires_grad_(), torch.tensor([1]))
    loss.backward()
    assert loss.item() == pytest.approx(200 - torch.tensor(2.0).log().item()) and logits.grad.isfinite().all()


def test_logit_pairing_is_its_formula(tiny_model: Classifier, prepared: Prepared) -> None:
    model, y = tiny_model.double().eval(), prepared.clean.y
    losses = LogitPairing(threat=THREAT, attack=PGD(), weight=0.7).loss(model, prepared)
    clean, attacked = model(prepared.clean.x), model(prepared.x)
    expected = (F.cross_entropy(clean, y) + F.cross_entropy(attacked, y)) / 2 + 0.7 * (clean - attacked).square().mean()
    assert torch.allclose(losses.total, expected)


@pytest.mark.parametrize("kind", [Adversarial, Trades, Mart, LogitPairing])
def test_soft_labels_of_one_class_are_that_class(kind: type, tiny_model: Classifier, prepared: Prepared) -> None:
    objective = kind(threat=THREAT, attack=PGD(loss="kl"), label_smoothing=0.1)
    soft = prepared._replace(clean=prepared.clean._replace(y=F.one_hot(prepared.clean.y, 3).double()))
    model = tiny_model.double().eval()
    assert torch.allclose(objective.loss(model, prepared).total, objective.loss(model, soft).total)


def test_parameters_are_frozen_while_the_attack_runs_and_free_after_it(tiny_model: Classifier, batch: Batch) -> None:
    seen = []

    def attack(model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        seen.extend(parameter.requires_grad for parameter in model.parameters())
        return batch.x

    Adversarial(threat=THREAT, attack=AttackBy(attack)).prepare(tiny_model, batch, progress=1.0, seed=0)
    assert seen and not any(seen)
    assert all(parameter.requires_grad for parameter in tiny_model.parameters())


@pytest.mark.parametrize("attack", [APGD(steps=2, keep="best", random_start=False), PGD(steps=2)])
def test_the_model_is_attacked_as_it_is_and_whole(tiny_model: Classifier, batch: Batch, attack: Attack) -> None:
    """No copy, no folding, no small batches: each would cost more than the attack."""
    asked: list[int] = []
    tiny_model.register_forward_hook(lambda module, inputs, output: asked.append(len(inputs[0])))
    Adversarial(threat=THREAT, attack=attack).prepare(tiny_model, batch, progress=1.0, seed=0)
    assert set(asked) <= {12} and len(asked) >= 3

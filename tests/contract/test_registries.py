"""Every plug-in of every registry keeps its contract; being registered is being tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bastion import BastionError, Threat, journal
from bastion.attacks import attacks
from bastion.data import datasets
from bastion.forward import misclassified
from bastion.models import checkpoint
from bastion.models.classifier import Classifier
from bastion.probes import probes
from bastion.recipe import Recipe
from bastion.training.build import set_up_objective
from bastion.training.objectives import objectives
from bastion.types import Attack, Batch, DataSet, Objective, TrainingContext

THREATS = [Threat("linf", 0.05), Threat("l2", 0.5), Threat("l1", 5.0)]
ids = [threat.norm for threat in THREATS]
THREAT_SPEC = {"norm": "linf", "eps": 0.05}

PAIR = {"name": "ensemble", "members": ["fgsm", {"name": "square", "queries": 5}]}

# What a plug-in needs to be built besides its name.
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"threat": THREAT_SPEC, "attack": {"name": "pgd", "steps": 2}} for name in ("adversarial", "alp", "mart")},
    "trades": {"threat": THREAT_SPEC, "attack": {"name": "pgd", "steps": 2, "loss": "kl"}},
    "sanity": {"threat": THREAT_SPEC},
    "flip-rate": {"perturbation": "rotate"},
    "two-phase": {"threat": THREAT_SPEC, "share": 0.5, "attack": PAIR, "first": 1},
    "transfer": {"threat": THREAT_SPEC, "attack": {"name": "pgd", "steps": 2}},
    "distortion": {"norm": "linf", "attack": {"name": "minimal", "fab_steps": 5, "steps": 5, "bisections": 3}},
    "perturbation": {"attack": {"name": "pgd", "steps": 2}},
    "synthesis": {"steps": 2},
    "frequency": {"cutoffs": [0.1, 0.3], "attack": {"name": "pgd", "steps": 2}},
    "perturbation-growth": {"threat": THREAT_SPEC, "attack": {"name": "pgd", "steps": 2}},
    "patch-fool": {"steps": 5},
    "ensemble": {"members": PAIR["members"]},
    **{name: {"steps": 10} for name in ("fab", "fab-t", "apgd", "apgd-ce", "apgd-dlr", "apgd-t")},
    "autoattack": {"version": "rand"},  # the other versions take thousands of Square's queries
    "square": {"queries": 40},
    "minimal": {"fab_steps": 10, "steps": 10, "bisections": 3},
}
ATTENDING = {
    "patch-fool",
    "pna",
    "self-ensemble",
    "attention-stability",
    "rspc",
}  # that refuse models without attention
LOOKING_INSIDE = {"jacobian", "jacobian-norms", "perturbation-growth"}
VIT = {"name": "vit/micro", "num_classes": 3, "img_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2}
# Thousands of passes, by members that are tested here one by one.
ATTACKS = [pytest.param(name, marks=pytest.mark.slow) if name == "autoattack" else name for name in attacks.names()]


@pytest.fixture
def batch(tiny_data: DataSet) -> Batch:
    return tiny_data.test.batch(range(12))


def _vit() -> Classifier:
    return checkpoint.build(VIT, mean=(0.4,) * 3, std=(0.2,) * 3).eval()


def _attack(name: str) -> Attack:
    return attacks.build({"name": name, **OPTIONS.get(name, {})})


@pytest.fixture
def victim(name: str, tiny_model: Classifier) -> Classifier:
    """A model that the attack, objective or probe takes."""
    return _vit() if name in ATTENDING | LOOKING_INSIDE else tiny_model


@pytest.fixture
def options(name: str, tmp_path: Path) -> dict[str, Any]:
    """What a probe is built from; one that needs a second model finds it saved."""
    if name == "transfer":
        checkpoint.save(_vit(), tmp_path)
        return {"name": name, "source": str(tmp_path), **OPTIONS[name]}
    return {"name": name, **OPTIONS.get(name, {})}


@pytest.mark.parametrize("threat", THREATS, ids=ids)
@pytest.mark.parametrize("name", ATTACKS)
class TestAttacks:
    def test_points_are_inside_and_no_worse(self, name: str, threat: Threat, victim: Classifier, batch: Batch) -> None:
        model = victim.eval()
        x = _attack(name)(model, batch, threat, seed=0)
        assert x.shape == batch.x.shape
        assert threat.contains(batch.x, x).all()
        assert (misclassified(model(x), batch.y) >= misclassified(model(batch.x), batch.y)).all()

    def test_same_seed_same_bits(self, name: str, threat: Threat, victim: Classifier, batch: Batch) -> None:
        attack = _attack(name)
        noise = torch.get_rng_state()
        first = attack(victim.eval(), batch, threat, seed=3)
        assert torch.equal(first, attack(victim, batch, threat, seed=3))
        assert torch.equal(torch.get_rng_state(), noise)
        assert all(parameter.grad is None for parameter in victim.parameters())

    def test_the_rest_of_the_batch_does_not_matter(
        self, name: str, threat: Threat, victim: Classifier, batch: Batch
    ) -> None:
        attack, model = _attack(name), victim.eval().double()
        batch = batch._replace(x=batch.x.double())
        whole = attack(model, batch, threat, seed=0)
        order = torch.tensor([7, 2, 11])
        assert torch.allclose(attack(model, batch.select(order), threat, seed=0), whole[order], atol=1e-9, rtol=0)

    def test_any_memory_format_and_one_rectangular_channel(self, name: str, threat: Threat) -> None:
        network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
        x = torch.rand(3, 1, 9, 6).contiguous(memory_format=torch.channels_last)
        batch = Batch(torch.arange(3), x, torch.tensor([0, 1, 2]))
        if name in ATTENDING:
            with pytest.raises(BastionError, match="attention|blocks"):
                _attack(name)(network, batch, threat, seed=0)
        else:
            assert threat.contains(x, _attack(name)(network, batch, threat, seed=0)).all()

    def test_eps_zero_returns_the_image(self, name: str, threat: Threat, victim: Classifier, batch: Batch) -> None:
        assert torch.equal(_attack(name)(victim.eval(), batch, threat.scaled(0), seed=0), batch.x)

    def test_it_takes_no_more_passes_than_it_says(
        self, name: str, threat: Threat, victim: Classifier, batch: Batch
    ) -> None:
        attack, y = _attack(name), victim.eval()(batch.x).argmax(1)
        with journal.opened() as notes:
            attack(victim, batch._replace(y=y), threat.scaled(0.01), seed=0)
        most = attack.passes(threat.norm)
        if name == "self-ensemble":  # the journal counts the short passes from each block to the head too
            most += attack.steps * (VIT["depth"] - 1)
        assert 1 < max(notes.forwards.values()) <= most + 1  # one on the clean image


@pytest.mark.parametrize("name", ATTACKS)
def test_images_that_are_none_are_refused(name: str, victim: Classifier, batch: Batch) -> None:
    for bad in (batch._replace(x=batch.x * 255), batch._replace(x=batch.x + torch.nan), batch._replace(y=batch.y + 3)):
        with pytest.raises(BastionError, match=r"pixels outside \[0, 1\] or NaN|labels must be integers from 0 to 2"):
            _attack(name)(victim.eval(), bad, THREATS[0], seed=0)


def _objective(name: str, model: Classifier, data: DataSet) -> Objective:
    spec = {"name": name, **OPTIONS.get(name, {})}
    recipe = Recipe.model_validate({"data": "cifar10-mini", "model": "vit/micro", "objective": spec})
    objective: Objective = objectives.build(spec)
    set_up_objective(objective, TrainingContext(model, data, recipe))
    return objective


@pytest.mark.parametrize("name", objectives.names())
class TestObjectives:
    def test_its_loss_trains_the_model(self, name: str, victim: Classifier, tiny_data: DataSet, batch: Batch) -> None:
        objective = _objective(name, victim, tiny_data)
        victim.train()
        prepared = objective.prepare(victim, batch, progress=1.0, seed=0)
        losses = objective.loss(victim, prepared)
        losses.total.backward()
        assert losses.total.ndim == 0
        assert losses.logits.shape == (12, 3)
        assert all(p.grad is not None and p.grad.isfinite().all() for p in victim.parameters())
        assert victim.training

    def test_preparing_leaves_no_gradient_and_is_a_function_of_the_seed(
        self, name: str, victim: Classifier, tiny_data: DataSet, batch: Batch
    ) -> None:
        objective = _objective(name, victim, tiny_data)
        first = objective.prepare(victim, batch, progress=1.0, seed=1)
        assert all(p.grad is None for p in victim.parameters())
        assert torch.equal(objective.prepare(victim, batch, progress=1.0, seed=1).x, first.x)
        assert not first.x.requires_grad


@pytest.mark.parametrize("name", probes.names())
class TestProbes:
    def test_facts_have_one_row_per_example_and_do_not_depend_on_the_rest(
        self, options: dict[str, Any], victim: Classifier, batch: Batch
    ) -> None:
        probe = probes.build(options)
        facts = probe(victim.eval(), batch, seed=0)
        assert facts
        assert all(len(fact) == 12 for fact in facts.values())
        part = probe(victim, batch.select(torch.tensor([4, 1])), seed=0)
        for fact, value in part.items():
            assert torch.allclose(value.double(), facts[fact][[4, 1]].double(), atol=1e-5, equal_nan=True), fact


def test_the_embedded_data_set_keeps_its_contract() -> None:
    data = datasets.build("cifar10-mini")
    assert (len(data.train), len(data.val), len(data.test)) == (3600, 400, 1000)
    assert not set(data.train.index.tolist()) & set(data.val.index.tolist())
    for split in (data.train, data.val, data.test):
        batch = split.batch([0, len(split) - 1]).check(len(data.classes), "here")
        assert batch.x.shape[1:] == data.shape
        assert torch.equal(batch.index, split.index[[0, -1]])
        assert torch.equal(batch.y, split.labels[[0, -1]])
        assert split.image(0).size == (32, 32)
        assert torch.bincount(split.labels).unique().numel() == 1  # balanced

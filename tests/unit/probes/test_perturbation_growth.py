from __future__ import annotations

import pytest
import torch
from tests.vits import right_batch, small_vit
from torch import Tensor, nn

from bastion.attacks import Threat
from bastion.attacks.pgd import PGD
from bastion.models import Backbone, Classifier
from bastion.models.classifier import Blocks
from bastion.probes import perturbation_growth
from bastion.probes.jacobian import JacobianSpectra
from bastion.probes.perturbation_growth import PerturbationGrowth
from bastion.types import Batch

THREAT = Threat("l2", 0.5)


class LinearBlock(nn.Module):
    """x + A x, with the gain given in every direction."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * x


def linear_chain(*gains: float) -> tuple[Classifier, Batch]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Sequential(*map(LinearBlock, gains)), nn.Linear(48, 3))
    backbone = Backbone(network, 3, (3, 4, 4), blocks=(Blocks("1.*"),))
    model = Classifier(backbone, (0.0,) * 3, (0.5,) * 3).double().eval()
    return model, right_batch(model, n=5, size=4)


def test_a_chain_of_known_gains_multiplies_the_perturbation_by_each() -> None:
    model, batch = linear_chain(0.5, 2.0, 0.0)
    facts = PerturbationGrowth(threat=THREAT)(model, batch, seed=0)
    growth = torch.tensor([1, 1.5, 4.5, 4.5])
    for name in ("attacked", "noise"):
        assert torch.allclose(facts[name], 2 * facts["pixels"][:, None] * growth, rtol=1e-5)  # std 0.5 doubles it
    assert torch.allclose(facts["entering"], facts["attacked"][:, :-1])
    assert torch.allclose(facts["gain"], torch.tensor(4.5), rtol=1e-5)


def test_on_a_linear_chain_the_product_of_one_plus_sigma_is_met() -> None:
    """σ of F is the gain itself, so ∏(1 + σ) is exact, and Eq. 15's exp(Σσ) is above it."""
    model, batch = linear_chain(0.5, 2.0)
    growth = PerturbationGrowth(threat=THREAT)(model, batch, seed=0)
    sigma = JacobianSpectra(parts=("branch",))(model, batch, seed=0)["branch"][:, :, 0]
    assert torch.allclose(growth["gain"], (1 + sigma).prod(1), rtol=1e-5)
    assert (growth["gain"] < sigma.sum(1).exp()).all()


def test_distances_are_those_of_the_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perturbation_growth, "AT_ONCE", 4)
    model = small_vit()
    batch = right_batch(model)
    wrong = batch._replace(y=torch.cat([batch.y[:5], 2 - batch.y[5:] + (batch.y[5:] == 1)]))
    assert wrong.y[5] != batch.y[5]
    probe = PerturbationGrowth(threat=THREAT, attack=PGD(steps=3))
    facts = probe(model, wrong, seed=0)
    x = probe.attack(model, wrong.select(torch.arange(5)), THREAT, seed=0)
    with torch.no_grad():
        with model.tap("blocks") as clean:
            model(batch.x[:5])
        with model.tap("blocks") as attacked:
            model(x)
    for number, name in enumerate(clean.blocks):
        away = (clean.blocks[name] - attacked.blocks[name]).flatten(1).norm(dim=1)
        assert torch.allclose(facts["attacked"][:5, 1 + number].double(), away, rtol=1e-4)
    assert all(fact[5].isnan().all() for fact in facts.values())


def test_noise_has_the_length_of_the_perturbation() -> None:
    model, batch = linear_chain(0.0)
    facts = PerturbationGrowth(threat=Threat("linf", 8 / 255))(model, batch, seed=0)
    assert torch.allclose(facts["noise"], facts["attacked"], rtol=1e-5)

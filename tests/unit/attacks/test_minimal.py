"""Attacks that look for the nearest fooling point: CW, DeepFool, and the search for the smallest distortion."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import Linear, MakeLinear
from tests.oracles import distance, nearest
from torch import Tensor, nn

from bastion import Threat
from bastion.attacks.apgd import APGD
from bastion.attacks.cw import CW
from bastion.attacks.deepfool import DeepFool
from bastion.attacks.minimal import Minimal
from bastion.probes.distortion import Distortion
from bastion.threat import Norm
from bastion.types import Batch

BOX = {"linf": Threat("linf", 1.0), "l2": Threat("l2", 10.0), "l1": Threat("l1", 90.0)}
NORMS: list[Norm] = ["linf", "l2", "l1"]


def _ratios(norm: Norm, model: Linear, batch: Batch, x: Tensor) -> Tensor:
    """Distance over the true one; every point fools."""
    assert (model(x).argmax(1) != batch.y).all()
    return BOX[norm].distance(batch.x, x) / nearest(norm, model, batch)


@pytest.mark.parametrize(("norm", "interior"), [("linf", False), ("l2", False), ("l1", False), ("l2", True)])
def test_minimal_finds_the_true_distance(norm: Norm, interior: bool, make_linear: MakeLinear) -> None:
    model, batch = make_linear(classes=5, interior=interior)
    ratios = _ratios(norm, model, batch, Minimal(steps=20, fab_steps=20)(model, batch, BOX[norm], seed=0))
    assert ratios.min() >= 1 - 1e-6
    assert ratios.max() <= 1.02 + 2**-10


@pytest.mark.parametrize("norm", NORMS)
def test_minimal_is_never_beaten_by_an_attack_at_a_fixed_radius(norm: Norm, make_linear: MakeLinear) -> None:
    model, batch = make_linear(classes=5, n=8)
    found = BOX[norm].distance(batch.x, Minimal(steps=10, fab_steps=20)(model, batch, BOX[norm], seed=0))
    for eps in nearest(norm, model, batch).quantile(torch.tensor([0.3, 0.8], dtype=torch.float64)).tolist():
        threat = Threat(norm, eps)
        fooled = model(APGD(steps=50, loss="dlr", targets=4)(model, batch, threat, seed=0)).argmax(1) != batch.y
        assert (found[fooled] <= eps * (1 + 1e-6)).all()


def test_minimal_returns_the_image_where_nothing_fools_and_where_it_is_wrong_already(make_linear: MakeLinear) -> None:
    _, batch = make_linear(classes=3)
    constant = nn.Sequential(nn.Flatten(), nn.Linear(90, 3)).double()
    nn.init.zeros_(constant[1].weight)
    constant[1].bias.data = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    batch = batch._replace(y=torch.tensor([0, 1] * 8))
    assert torch.equal(Minimal(steps=3, fab_steps=3)(constant, batch, BOX["l2"], seed=0), batch.x)
    facts = Distortion("l2", Minimal(steps=3, fab_steps=3))(constant, batch, seed=0)
    assert facts["distance"].tolist() == [torch.inf, 0.0] * 8


def test_minimal_stays_inside_a_small_threat(make_linear: MakeLinear) -> None:
    model, batch = make_linear(classes=5, n=24)
    true = nearest("l2", model, batch)
    threat = Threat("l2", true.median().item())
    x = Minimal()(model, batch, threat, seed=0)
    assert threat.contains(batch.x, x).all()
    fooled = model(x).argmax(1) != batch.y
    assert not fooled[true > threat.eps].any()
    assert fooled[true < threat.eps / 1.001].all()


def test_distances_of_coarse_answers_are_near_the_true_ones(make_linear: MakeLinear) -> None:
    """The wrong class must lead by four roundings of the largest logit, and that is a little further away."""

    class Coarse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return model(x.double()).bfloat16()

    model, batch = make_linear(classes=2, n=24)
    batch = batch._replace(x=batch.x.float())
    x = Minimal(steps=20, fab_steps=20)(Coarse(), batch, BOX["l2"], seed=0)
    assert (Coarse()(x).argmax(1) != batch.y).all()
    logits = model(batch.x.double()).detach()
    gap = logits.gather(1, batch.y[:, None])[:, 0] - logits.gather(1, 1 - batch.y[:, None])[:, 0]
    largest = torch.maximum(logits, model(x.double())).abs().amax(1).detach()
    rounding = torch.finfo(torch.bfloat16).eps * largest
    towards = (model.weight[1 - batch.y] - model.weight[batch.y]).detach()
    near, far = (distance("l2", towards, batch.x.flatten(1).double(), gap + r * rounding) for r in (-2, 6))
    found = BOX["l2"].distance(batch.x, x)
    assert (near - 1e-6 <= found).all()
    assert (found <= 1.02 * far).all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("classes", [2, 5])
def test_deepfool_oversteps_the_nearest_boundary_by_two_percent(
    norm: Norm, classes: int, make_linear: MakeLinear
) -> None:
    model, batch = make_linear(classes=classes, interior=True)
    ratios = _ratios(norm, model, batch, DeepFool()(model, batch, BOX[norm], seed=0))
    assert torch.allclose(ratios, torch.full_like(ratios, 1.02), atol=1e-6)


def test_deepfool_looks_at_the_likeliest_classes_only(make_linear: MakeLinear) -> None:
    model, batch = make_linear(classes=5, interior=True)
    few = BOX["l2"].distance(batch.x, DeepFool(classes=1)(model, batch, BOX["l2"], seed=0))
    assert (few >= 1.02 * nearest("l2", model, batch) - 1e-9).all()
    assert (few > 1.03 * nearest("l2", model, batch)).any()


def test_cw_comes_within_two_percent_once_c_is_large_enough(make_linear: MakeLinear) -> None:
    """On a linear model a hit needs c > 2 m / ‖w‖², and the best one is at m / ‖w‖."""
    model, batch = make_linear(classes=2, interior=True)
    normal = (model.weight[0] - model.weight[1]).detach()
    gap = (model(batch.x)[:, 0] - model(batch.x)[:, 1]).abs().detach()
    far = gap > gap.median()  # Adam's first steps carry it past the boundary where that is near
    batch, gap = batch.select(far), gap[far]
    need = 2 * gap / normal.square().sum()
    x = CW(c=1.5 * need.max().item(), lr=1e-3, steps=1500)(model, batch, BOX["l2"], seed=0)
    assert _ratios("l2", model, batch, x).max() < 1.02
    x = CW(c=0.3 * need.min().item(), lr=1e-3, steps=500)(model, batch, BOX["l2"], seed=0)
    assert torch.equal(x, batch.x)


def test_cw_moves_pixels_on_the_faces_of_the_box() -> None:
    model = Linear(torch.tensor([[4.0] * 3, [0.0] * 3]), torch.tensor([0.0, 6.0]))
    batch = Batch(torch.arange(1), torch.ones(1, 3, 1, 1), torch.tensor([0]))
    x = CW(c=10.0, lr=0.1, steps=300)(model, batch, Threat("l2", 2.0), seed=0)
    assert model(x).argmax(1).item() == 1
    assert (x < 1).all()


def test_a_hit_outside_the_threat_does_not_count(make_linear: MakeLinear) -> None:
    model, batch = make_linear(classes=2, interior=True)
    small = Threat("l2", nearest("l2", model, batch).min().item() / 2)
    for attack in (CW(c=10.0), DeepFool(), Minimal(steps=5, fab_steps=5)):
        assert torch.equal(attack(model, batch, small, seed=0), batch.x)

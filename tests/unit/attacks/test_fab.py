"""FAB comes as near to the boundary of a linear classifier as theory says, and as the reference implementation does."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import MakeLinear, unaccelerated
from tests.oracles import nearest
from tests.unit.attacks.test_apgd import curved
from torch import Tensor, nn

from bastion import Threat, journal
from bastion.attacks.fab import FAB
from bastion.forward import misclassified
from bastion.threat import Norm, length
from bastion.types import Batch

NORMS: list[Norm] = ["linf", "l2", "l1"]
WIDE: dict[Norm, float] = {"linf": 1.0, "l2": 100.0, "l1": 1000.0}  # the whole box
# The second step starts at 0.9 · 1.05 of the way and is drawn back to the image by α = a₁ / (a₁ + a₂):
# with r = 0.945, a₁ = 1 - r and a₂ = 1 it ends at (1 - α)(r + 1.05(1 - r)) + 1.05α.
ALPHA = 0.055 / 1.055
CLOSE = (1 - ALPHA) * (0.945 + 1.05 * 0.055) + 1.05 * ALPHA


def ratios(attack: FAB, model: nn.Module, batch: Batch, norm: Norm) -> Tensor:
    """How much farther than the nearest fooling point the one found is."""
    x = attack(model, batch, Threat(norm, WIDE[norm]), seed=0)
    assert misclassified(model(x), batch.y).all()
    return length(norm, x - batch.x) / nearest(norm, model, batch)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("targets", [0, 4])
def test_distances_on_a_linear_model_are_those_of_theory(make_linear: MakeLinear, norm: Norm, targets: int) -> None:
    """One step goes 5 % past the nearest boundary; the second comes to 1.0052 of it, and there is nothing better."""
    assert pytest.approx(1.00521, abs=5e-6) == CLOSE
    model, batch = make_linear(classes=5, interior=True)
    for steps, expected in ((1, 1.05), (2, CLOSE), (3, CLOSE), (25, CLOSE)):
        found = ratios(FAB(steps=steps, targets=targets, keep="nearest"), model, batch, norm)
        assert found.tolist() == pytest.approx([expected] * 16, abs=1e-6)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("targets", [0, 4])
def test_at_the_walls_of_the_box_it_comes_within_a_percent(make_linear: MakeLinear, norm: Norm, targets: int) -> None:
    """Except untargeted l1: it ranks the boundaries without their walls, and may walk to one that is not nearest."""
    model, batch = make_linear(classes=5)
    found = ratios(FAB(steps=20, targets=targets, keep="nearest"), model, batch, norm)
    assert found.min() >= 1 - 1e-4
    assert found.max() <= (1.08 if norm == "l1" and not targets else 1.008)
    assert found.median() < 1.0066


@pytest.mark.parametrize("norm", NORMS)
def test_the_less_it_overshoots_the_nearer_it_comes(make_linear: MakeLinear, norm: Norm) -> None:
    model, batch = make_linear(classes=5, interior=True)
    found = ratios(FAB(steps=1, targets=4, overshoot=1 + 1e-7, keep="nearest"), model, batch, norm)
    assert torch.allclose(found, torch.ones_like(found), atol=2e-7)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("attack", [FAB(steps=10), FAB(steps=10, targets=9), FAB(steps=5, restarts=3)], ids=repr)
def test_it_fools_exactly_those_that_can_be_fooled(make_linear: MakeLinear, attack: FAB, norm: Norm) -> None:
    model, batch = make_linear(classes=6, n=32, interior=True)
    away = nearest(norm, model, batch)
    threat = Threat(norm, away.median().item())
    x = attack(model, batch, threat, seed=0)
    fooled = misclassified(model(x), batch.y)
    assert threat.contains(batch.x, x).all()
    assert torch.equal(fooled, away * (CLOSE + 1e-6) <= threat.eps)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("targeted", [False, True])
def test_it_comes_as_near_as_the_reference(norm: Norm, targeted: bool) -> None:
    """On a curved model, in float32; the reference minimises the norm, whatever its eps."""
    base = pytest.importorskip("pyautoattack.fab_pt")
    model, batch = curved(12, torch.float32)
    made = base.FABAttack_PT(model, {"linf": "Linf", "l2": "L2", "l1": "L1"}[norm], n_iter=8, eps=1.0)
    made.target_class = 2
    theirs = made.attack_single_run(batch.x, batch.y, is_targeted=targeted)
    model.zero_grad()
    attack = FAB(steps=8, targets=int(targeted), keep="nearest")
    ours = attack(model, batch, Threat(norm, WIDE[norm]), seed=0)
    assert misclassified(model(ours), batch.y).all()
    expected = length(norm, theirs - batch.x)
    assert torch.allclose(length(norm, ours - batch.x), expected, rtol=2e-3)
    if norm != "l1":
        assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_a_fooling_step_costs_two_passes_and_any_other_one(make_linear: MakeLinear, steps: int) -> None:
    """On a linear model every step fools, outside of a small ball. The point it leads to is asked about, and the
    point drawn back from it with a gradient; only the first such pair has a gradient that nobody needed."""
    model, batch = make_linear(classes=3, interior=True)
    with journal.opened() as notes:
        FAB(steps=steps, targets=1)(unaccelerated(model, 8), batch, Threat("l2", 1e-6), seed=0)
    assert set(notes.forwards.values()) == {1 + 2 * steps}
    assert set(notes.backwards.values()) == {steps + (steps > 1)}


def test_restarts_begin_at_half_the_radius_and_help() -> None:
    """A shell that only another start than the image leads into: nothing to follow at the image itself."""

    class Pit(nn.Module):
        """Flat within 0.1 of grey, fooled beyond 0.35 of it."""

        def forward(self, x: Tensor) -> Tensor:
            height = (x - 0.5).flatten(1).norm(dim=1)
            lead = torch.where(height > 0.1, height - 0.35, -0.25 + 0 * height)
            return torch.stack([torch.zeros_like(lead), lead], 1)

    batch = Batch(
        torch.arange(4), torch.full((4, 1, 2, 2), 0.5, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    )
    threat = Threat("l2", 0.4)
    assert torch.equal(FAB(steps=10)(Pit(), batch, threat, seed=0), batch.x)
    x = FAB(steps=10, restarts=2)(Pit(), batch, threat, seed=0)
    assert misclassified(Pit()(x), batch.y).all()
    assert threat.contains(batch.x, x).all()


@pytest.mark.parametrize("norm", NORMS)
def test_a_model_without_a_slope_gets_the_clean_image_back(norm: Norm) -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.isfinite().all()
            return x.flatten(1)[:, :3] * 0 + torch.tensor([1.0, 0.5, 0.0], dtype=x.dtype)

    batch = Batch(torch.arange(3), torch.rand(3, 1, 2, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64))
    for attack in (FAB(steps=4), FAB(steps=4, targets=2, restarts=2), FAB(steps=0)):
        with journal.opened() as notes:
            assert torch.equal(attack(Flat(), batch, Threat(norm, 0.5), seed=0), batch.x)
        assert notes.notices == ({"blind-start": {0, 1, 2}} if attack.steps else {})

"""Confidence in the true class, with the same patches attacked, noisy and occluded."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import MakeLinear
from tests.vits import right_batch, small_vit

from bastion.attacks.losses import ce
from bastion.patches import Grid
from bastion.probes.occlusion import Occlusion
from bastion.probes.patch_confidence import PatchConfidence


def test_all_changes_are_of_the_same_patches_and_occlusion_is_that_of_the_other_probe() -> None:
    model = small_vit()
    batch = right_batch(model)
    facts = PatchConfidence(share=0.25, size=4)(model, batch, seed=5)
    grid = Grid.of(batch.x, 4)
    touched = [grid.sums((facts[name] != batch.x).any(1).double()) > 0 for name in ("adversarial", "noisy", "occluded")]
    assert torch.equal(touched[0], touched[1]) and torch.equal(touched[1], touched[2])
    assert touched[0].sum(1).tolist() == [4] * 6
    assert float((facts["adversarial"] - batch.x).abs().max()) <= 8 / 255 + 1e-9
    other = Occlusion(share=0.25, size=4)(model, batch, seed=5)
    assert torch.equal(facts["occluded"], other["occluded"])
    assert torch.equal(facts["occluded_confidence"], other["confidence"])
    assert torch.equal(facts["clean_confidence"], other["clean_confidence"])


def test_confidences_are_the_probabilities_of_what_is_shown() -> None:
    model = small_vit()
    batch = right_batch(model)
    facts = PatchConfidence(share=0.25, size=4)(model, batch, seed=5)
    for name in ("clean", "adversarial", "noisy", "occluded"):
        expected = (-ce(model(facts[name]), batch.y)).exp().detach().float()
        assert torch.allclose(facts[f"{name}_confidence"], expected), name
    assert facts["forwards"].tolist() == [4 + 5] * 6 and facts["backwards"].tolist() == [5] * 6


def test_pgd_reaches_the_corner_of_the_patches_on_a_linear_model(make_linear: MakeLinear) -> None:
    """Of two classes: the margin falls by eps times the l1 norm of the weights inside, and what is last counts."""
    model, batch = make_linear(classes=2, shape=(3, 8, 8), interior=True)
    facts = PatchConfidence(share=0.25, size=4, eps=0.02, rel_step=2.0)(model, batch, seed=0)
    inside = (facts["occluded"] != batch.x).double()
    towards = (model.weight[1 - batch.y] - model.weight[batch.y]).view_as(batch.x)
    logits = model(batch.x)
    margin = (logits.gather(1, batch.y[:, None]) - logits.gather(1, 1 - batch.y[:, None]))[:, 0]
    reached = torch.sigmoid(margin - 0.02 * (towards.abs() * inside).sum((1, 2, 3)))
    assert facts["adversarial_confidence"].tolist() == pytest.approx(reached.tolist(), rel=1e-5)

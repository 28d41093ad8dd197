"""Perturbations as pictures: those of linear classifiers are known, and planted ones are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planted import Save, by_rows, linear
from tests.conftest import AttackBy, MakeLinear
from torch import Tensor, nn

from bastion import BastionError, Threat
from bastion.attacks.pgd import PGD
from bastion.models import Classifier
from bastion.probes import probes
from bastion.probes.perturbation import Perturbation, as_picture, in_top
from bastion.registry import canonical
from bastion.types import Batch, DataSet

EPS = 4 / 255


def test_the_defaults_are_those_of_the_thesis() -> None:
    probe = Perturbation()
    assert probe.threat == Threat("linf", 4 / 255)
    assert probe.attack == PGD(steps=100, rel_step=1.5 / 100)
    assert canonical(probe) == {"name": "perturbation"}


def test_the_perturbation_of_a_linear_classifier_is_the_sign_of_its_weights(make_linear: MakeLinear) -> None:
    """δ = ε·sign(w), so its picture is black or white; -δ is the class itself to a linear model, and δ the other."""
    model, batch = make_linear(classes=2, n=6, interior=True)
    attack = PGD(steps=100, rel_step=1.5 / 100, random_start=False)
    facts = Perturbation(attack=attack)(model, batch, seed=0)
    towards = (model.weight[1 - batch.y] - model.weight[batch.y]).detach().view(batch.x.shape)
    delta = facts["adversarial"] - facts["clean"]
    assert torch.allclose(delta, EPS * towards.sign(), atol=1e-12)
    assert torch.allclose(as_picture(delta, Threat("linf", EPS)), (towards > 0).double(), atol=1e-9)
    assert not facts["top1"].any()
    assert facts["top1_negative"].all()
    assert facts["forwards"].unique().tolist() == [101]
    assert facts["backwards"].unique().tolist() == [100]


def test_a_random_start_leaves_what_the_steps_do_not_reach(make_linear: MakeLinear) -> None:
    """100 steps of 1.5 ε / 100 go 1.5 ε: a pixel that begins at u ends at min(u + 1.5 ε, ε) along the sign."""
    model, batch = make_linear(classes=2, n=4, interior=True)
    facts = Perturbation()(model, batch, seed=0)
    towards = (model.weight[1 - batch.y] - model.weight[batch.y]).detach().view(batch.x.shape)
    along = (facts["adversarial"] - facts["clean"]) * towards.sign() / EPS
    assert along.min() >= 0.5 - 1e-9
    assert 0.6 < (along > 1 - 1e-9).double().mean() < 0.9  # 3/4 on average


def _writing(sign: float) -> AttackBy:
    """An attack that writes the label into the perturbation: its row up, the others down; or the other way round."""

    def write(model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        return batch.x + sign * threat.eps * (2 * by_rows().to(batch.x)[batch.y] - 1)

    return AttackBy(write)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_classifiers_read_a_planted_perturbation_in_the_sign_it_was_written(save: Save, sign: float) -> None:
    """Class k reads row k; a classifier that reads the next row has the label last but in the other sign."""
    model, batch = linear(by_rows()), Batch(torch.arange(8), torch.full((8, 3, 8, 8), 0.5), torch.arange(8))
    classifiers = (save("same", by_rows()), save("next", by_rows().roll(1, 0)))
    facts = Perturbation(attack=_writing(sign), classifiers=classifiers)(model, batch, seed=0)
    written, other = ("", "_negative") if sign > 0 else ("_negative", "")
    assert facts[f"top1{written}"].tolist() == [[True, True, False]] * 8
    assert facts[f"top1{other}"][:, :2].any().item() is False
    assert facts[f"top5{written}"][:, :2].all()
    assert not facts[f"top5{other}"][:, :2].any()  # the label's row is the darkest of eight
    assert facts["top1"].shape == facts["top5_negative"].shape == (8, 3)


def test_without_a_bound_per_pixel_the_largest_change_of_each_example_is_the_scale() -> None:
    delta = torch.tensor([[-0.5, 0.25], [0.1, 0.0], [0.0, 0.0]]).view(3, 1, 1, 2)
    assert as_picture(delta, Threat("l2", 3.0)).flatten(1).tolist() == [[0, 0.75], [1, 0.5], [0.5, 0.5]]
    assert torch.allclose(as_picture(delta, Threat("linf", 1.0)), 0.5 + delta / 2)


def test_top_five_of_few_classes_is_all_of_them_and_nan_is_none() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, torch.nan, 3.0]])
    assert in_top(5, logits, torch.tensor([0, 0])).tolist() == [True, False]
    assert in_top(2, torch.arange(4.0).repeat(4, 1), torch.arange(4)).tolist() == [False, False, True, True]


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_one_channel_and_rectangles_work_in_every_norm(norm: Any) -> None:
    model = linear(torch.randn(4, 1, 9, 6, generator=torch.Generator().manual_seed(0)))
    batch = Batch(torch.arange(3), torch.rand(3, 1, 9, 6), torch.tensor([0, 1, 2]))
    facts = Perturbation(threat=Threat(norm, 0.1), attack=PGD(steps=2), bins=5)(model, batch, seed=0)
    assert facts["energy"].shape == (3, 5)
    assert torch.allclose(facts["energy"].sum(1), torch.ones(3), atol=1e-5)


def test_clean_mistakes_are_attacked_but_not_fooled(tiny_model: Classifier, tiny_data: DataSet) -> None:
    batch = tiny_data.test.batch(range(24))
    facts = Perturbation(attack=PGD(steps=3))(tiny_model.eval(), batch, seed=0)
    wrong = facts["before"] != batch.y
    assert wrong.any() and not facts["fooled"][wrong].any()
    assert (facts["adversarial"] != facts["clean"]).flatten(1).any(1).all()


def test_classifiers_that_do_not_fit_are_refused_in_a_line(save: Save, tiny_model: Classifier) -> None:
    batch = Batch(torch.arange(2), torch.rand(2, 3, 8, 8), torch.tensor([0, 1]))
    with pytest.raises(BastionError, match=r"^suite.p: no model 'nowhere'"):
        probes.build({"name": "perturbation", "classifiers": ["nowhere"]}, "suite.p")
    with pytest.raises(BastionError, match=r"^p.classifiers: .*, got 'zoo/cifar10-linf-vit'"):
        probes.build({"name": "perturbation", "classifiers": "zoo/cifar10-linf-vit"}, "p")
    eight = Perturbation(attack=PGD(steps=1), classifiers=(save("eight", by_rows()),))
    with pytest.raises(BastionError, match="perturbation, classifier .*eight has 8 classes, the measured model 3"):
        eight(tiny_model.eval(), batch, seed=0)
    small = Perturbation(attack=PGD(steps=1), classifiers=(save("small", by_rows(size=4)),))
    with pytest.raises(BastionError, match="probe perturbation, classifier .*small: .* does not take 8×8"):
        small(tiny_model.eval(), batch, seed=0)


def test_facts_are_of_the_classifiers_as_they_are_now(save: Save) -> None:
    path = save("same", by_rows())
    first = canonical(Perturbation(classifiers=(path,)))
    assert canonical(Perturbation(classifiers=(path,))) == first
    save("same", by_rows().roll(1, 0))
    assert canonical(Perturbation(classifiers=(path,))) != first

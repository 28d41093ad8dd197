"""Images made for a class: on linear models the best one is known."""

from __future__ import annotations

import pytest
import torch
from planted import Save, by_rows, linear
from tests.conftest import MakeLinear

from bastion import BastionError
from bastion.models import Classifier
from bastion.probes import probes
from bastion.probes.synthesis import Synthesis
from bastion.threat import at_size, project
from bastion.types import Batch, DataSet


def test_the_radius_is_fifteen_at_224_pixels_and_shrinks_with_the_side() -> None:
    assert at_size(15, torch.zeros(1, 3, 224, 224)) == 15
    assert at_size(15, torch.zeros(1, 3, 32, 32)) == pytest.approx(2.142857, abs=1e-6)
    assert at_size(15, torch.zeros(1, 1, 16, 64)) == pytest.approx(2.142857, abs=1e-6)


def test_from_an_image_inside_the_box_it_ends_on_the_ball_along_the_weights(make_linear: MakeLinear) -> None:
    model, batch = make_linear(classes=2, n=5, interior=True)
    model.weight.data *= 0.1  # so that the loss has a slope to the end
    facts = Synthesis(start="image", eps=0.3)(model, batch, seed=0)
    towards = (model.weight[1 - batch.y] - model.weight[batch.y]).detach()
    expected = batch.x + 0.3 * (towards / towards.norm(dim=1, keepdim=True)).view(batch.x.shape)
    assert torch.equal(facts["target"], 1 - batch.y)
    assert torch.allclose(facts["synthesised"], expected, atol=1e-6)


def test_from_noise_it_reaches_the_best_point_of_ball_and_box(make_linear: MakeLinear) -> None:
    """The projection of a point far along w is where w·x is largest."""
    model, batch = make_linear(classes=2, n=5)
    model.weight.data, model.bias.data = 0.1 * model.weight.data, 0.1 * model.bias.data
    facts = Synthesis(eps=2.0)(model, batch, seed=0)
    x0, target = facts["start"], facts["target"]
    towards = (model.weight[target] - model.weight[1 - target]).detach().view(x0.shape)
    best = project("l2", x0, x0 + 1e6 * towards, 2.0)
    gained, most = ((towards * (x - x0)).sum((1, 2, 3)) for x in (facts["synthesised"], best))
    assert (gained >= 0.999 * most).all() and (gained <= most + 1e-9).all()
    assert facts["success"].all()
    assert torch.allclose(facts["confidence"], model(facts["synthesised"]).softmax(1)[range(5), target].float())


def test_noise_and_targets_depend_on_seed_and_index_alone(tiny_model: Classifier, tiny_data: DataSet) -> None:
    model, batch = tiny_model.eval().double(), tiny_data.test.batch(range(12))
    batch = batch._replace(x=batch.x.double())
    whole = Synthesis(steps=3)(model, batch, seed=1)
    some = torch.tensor([7, 2])
    part = Synthesis(steps=3)(model, batch.select(some), seed=1)
    for name, value in part.items():
        assert torch.allclose(value.double(), whole[name][some].double(), atol=1e-9), name
    assert not torch.equal(Synthesis(steps=3)(model, batch, seed=2)["start"], whole["start"])
    assert 0 <= whole["start"].min() < 0.01 and 0.99 < whole["start"].max() < 1


def test_targets_are_uniform_over_the_classes_and_never_the_label_of_an_image() -> None:
    classes, n = 8, 2000
    batch = Batch(torch.arange(n), torch.full((n, 3, 8, 8), 0.5), torch.arange(n) % classes)
    model = linear(by_rows())
    noise = Synthesis(steps=0)(model, batch, seed=0)["target"]
    images = Synthesis(start="image", steps=0)(model, batch, seed=0)["target"]
    assert not (images == batch.y).any()
    assert (noise == batch.y).any()
    for target in (noise, images):
        counts = torch.bincount(target, minlength=classes)
        assert (counts - n / classes).abs().max() < 5 * (n / classes) ** 0.5


def test_steps_sum_to_two_and_a_half_radii(tiny_model: Classifier, tiny_data: DataSet) -> None:
    model, batch = tiny_model.eval(), tiny_data.test.batch(range(4))
    default, given, shorter = (
        Synthesis(steps=10, rel_step=rel_step)(model, batch, seed=0)["synthesised"] for rel_step in (None, 0.25, 0.15)
    )
    assert torch.equal(default, given)
    assert not torch.allclose(default, shorter, atol=1e-3)


def test_no_steps_return_the_start() -> None:
    batch = Batch(torch.arange(2), torch.rand(2, 3, 8, 8), torch.tensor([0, 1]))
    facts = Synthesis(start="image", steps=0)(linear(by_rows()), batch, seed=0)
    assert torch.equal(facts["synthesised"], batch.x)


def test_other_classifiers_say_what_they_recognise(save: Save) -> None:
    """One reads the same rows, the other those beside them."""
    batch = Batch(torch.arange(6), torch.rand(6, 3, 8, 8), torch.arange(6))
    classifiers = (save("same", by_rows()), save("next", by_rows().roll(1, 0)))
    facts = Synthesis(eps=5.0, classifiers=classifiers)(linear(by_rows()), batch, seed=0)
    assert facts["success"].all()
    assert facts["recognised"].tolist() == [[True, False]] * 6


def test_bad_input_is_a_line(tiny_model: Classifier) -> None:
    with pytest.raises(BastionError, match=r"^p.start: unknown start 'nois'; did you mean 'noise'\?"):
        probes.build({"name": "synthesis", "start": "nois"}, "p")
    with pytest.raises(BastionError, match="^p.eps: .*got -1"):
        probes.build({"name": "synthesis", "eps": -1}, "p")
    dark = Batch(torch.arange(1), torch.full((1, 3, 8, 8), 255.0), torch.tensor([0]))
    with pytest.raises(BastionError, match=r"probe synthesis: image 0 has pixels outside \[0, 1\]"):
        Synthesis()(tiny_model.eval(), dark, seed=0)

"""Alignment and spectrum of input gradients, which linear models have in their weights."""

from __future__ import annotations

import math

import pytest
import torch
from planted import linear
from tests.conftest import MakeLinear
from torch import Tensor, nn

from bastion.probes.input_gradient import InputGradient
from bastion.types import Batch


def test_the_gradient_of_a_linear_models_logit_is_its_weight(make_linear: MakeLinear) -> None:
    model, batch = make_linear(classes=4, n=6)
    facts = InputGradient()(model, batch, seed=0)
    weight = model.weight.detach()[batch.y]  # of the predicted class
    x = batch.x.flatten(1)
    alignment = (x * weight).sum(1).abs() / weight.norm(dim=1)
    assert torch.allclose(facts["gradient"].flatten(1), weight)
    assert torch.allclose(facts["alignment"].double(), alignment, rtol=1e-6)
    assert torch.allclose(facts["cosine"].double(), alignment / x.norm(dim=1), rtol=1e-6)
    assert torch.allclose(facts["norm"].double(), weight.norm(dim=1), rtol=1e-6)


def test_the_gradient_of_the_loss_is_that_of_the_cross_entropy(make_linear: MakeLinear) -> None:
    model, batch = make_linear(classes=4, n=6)
    facts = InputGradient(of="loss")(model, batch, seed=0)
    wrong = model(batch.x).softmax(1) - nn.functional.one_hot(batch.y, 4)
    assert torch.allclose(facts["gradient"].flatten(1), (wrong @ model.weight).detach())


def test_a_model_that_reads_the_image_itself_is_wholly_aligned() -> None:
    """Also with the sign turned, and whatever the mean: only the correlation is free of it."""
    image = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    batch = Batch(torch.arange(1), image, torch.tensor([0]))
    facts = InputGradient()(linear(torch.cat([image, -image])), batch, seed=0)
    assert facts["cosine"].item() == facts["correlation"].item() == pytest.approx(1, abs=1e-6)
    assert facts["alignment"].item() == pytest.approx(image.norm().item(), rel=1e-6)
    shifted = torch.cat([2 * (image - 0.7), -image])
    facts = InputGradient()(linear(shifted), batch._replace(x=image), seed=0)
    assert facts["correlation"].item() == pytest.approx(1, abs=1e-6)
    assert facts["cosine"].item() < 0.9


def test_the_spectrum_of_a_wave_in_the_weights_is_one_ring() -> None:
    steps = torch.arange(32) * (2 * math.pi / 32)
    wave = torch.cos(5 * steps[:, None] + 3 * steps).expand(1, 1, 32, 32)
    batch = Batch(torch.arange(1), torch.rand(1, 1, 32, 32), torch.tensor([0]))
    energy = InputGradient()(linear(torch.cat([wave, -wave])), batch, seed=0)["energy"][0]
    assert energy.argmax().item() == math.floor(math.hypot(5, 3) / math.sqrt(2))
    assert energy.max().item() == pytest.approx(1, abs=1e-6)


def test_no_gradient_has_no_alignment() -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros(len(x), 2) + 0 * x.sum()

    facts = InputGradient()(Constant(), Batch(torch.arange(2), torch.rand(2, 3, 4, 4), torch.tensor([0, 1])), seed=0)
    assert facts["norm"].tolist() == [0, 0]
    assert all(facts[name].isnan().all() for name in ("alignment", "cosine", "correlation", "energy"))

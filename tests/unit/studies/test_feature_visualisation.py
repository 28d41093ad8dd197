"""Images that excite a unit: on linear models they are the corners of the box."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.vits import small_vit
from torch import Tensor, nn

from bastion import BastionError
from bastion.models import Classifier
from bastion.studies import studies
from bastion.studies.feature_visualisation import (
    Activations,
    FeatureVisualisation,
    block_channels,
    is_channels_last,
    penultimate,
    total_variation,
)
from bastion.types import DataSet


class Signs(nn.Module):
    """Three logits with weights of -1 and +1."""

    def __init__(self) -> None:
        super().__init__()
        signs = torch.randn(3, 192, generator=torch.Generator().manual_seed(0)).sign()
        self.head = nn.Linear(192, 3, bias=False)
        self.head.weight.data = signs

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1))
        return logits


@pytest.mark.parametrize("start", ["noise", "image"])
def test_the_best_image_of_a_linear_logit_is_the_sign_of_its_weights(start: Any, tiny_data: DataSet) -> None:
    model, study = Signs(), FeatureVisualisation(layer="logits", start=start, step=1.0, steps=30)
    assert study.parts(model, tiny_data) == 3
    for part in range(3):
        facts = study(model, tiny_data, part, seed=0)
        weight = model.head.weight[part].detach().view(3, 8, 8)
        assert facts["unit"].item() == part
        assert torch.equal(facts["image"], torch.where(weight > 0, 255, 0).to(torch.uint8))
        assert facts["activation"].item() == pytest.approx((weight > 0).sum().item())
        assert facts["before"].item() == pytest.approx(
            (weight * facts["start"].double() / 255).sum().item(),
            abs=0.5,
        )


def test_it_goes_up_the_activation_of_any_layer(tiny_data: DataSet) -> None:
    model = small_vit(size=8).float()
    for layer in ("logits", "penultimate", 0, -1):
        study = FeatureVisualisation(layer=layer, units=(1,), steps=10)
        facts = study(model, tiny_data, 0, seed=0)
        assert facts["activation"] > facts["before"], layer
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_the_penultimate_layer_is_what_the_head_gets() -> None:
    model = small_vit()
    x = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    assert torch.allclose(model.network.head(penultimate(model, x)), model(x))


def test_a_blocks_channels_are_averaged_over_its_places() -> None:
    model, x = small_vit(), torch.rand(2, 3, 16, 16, dtype=torch.float64)
    with model.tap("blocks") as taps:
        model(x)
    assert torch.equal(block_channels(model, x, 1), taps.blocks["blocks.1"].mean(1))
    assert torch.equal(block_channels(model, x, -1), taps.blocks["blocks.2"].mean(1))
    assert is_channels_last(torch.zeros(2, 8, 8, 96))
    assert not is_channels_last(torch.zeros(2, 64, 8, 8)) and not is_channels_last(torch.zeros(2, 8, 8, 8))


@pytest.mark.parametrize("relu", [nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6()])
def test_a_unit_that_is_off_is_woken_up(relu: nn.Module) -> None:
    """The last ReLU lets gradients pass; its values, and the ReLU before it, are as ever."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), relu, nn.Linear(4, 3), relu, nn.Linear(3, 2))
    model[3].bias.data[0] = -1.0
    x = torch.full((1, 3, 8, 8), 0.5, requires_grad=True)
    units = Activations(model, "penultimate")(x)
    assert torch.equal(units, model[:5](x))
    assert units[0, 0] == 0
    (gradient,) = torch.autograd.grad(units[0, 0], x)
    (expected,) = torch.autograd.grad(model[:4](x)[0, 0], x)
    assert torch.equal(gradient, expected) and gradient.any()


def test_smoothness_costs_total_variation() -> None:
    checker = ((-1.0) ** (torch.arange(6)[:, None] + torch.arange(6))).expand(1, 3, 6, 6) / 2 + 0.5
    assert total_variation(checker).item() == pytest.approx(2)
    assert total_variation(torch.full((1, 3, 6, 6), 0.3)).item() == 0
    slope = torch.arange(6.0).expand(1, 1, 6, 6) / 10
    assert total_variation(slope).item() == pytest.approx(0.1)
    plain, smooth = Activations(Signs(), "logits"), Activations(Signs(), "logits", smoothness=3.0)
    x = torch.rand(2, 3, 8, 8)
    assert torch.allclose(smooth(x), plain(x) - 3 * total_variation(x)[:, None])
    assert torch.equal(smooth.plain(x), plain(x))


def test_smooth_images_vary_less(tiny_data: DataSet) -> None:
    rough, smooth = (
        FeatureVisualisation(layer="logits", smoothness=weight, step=0.3, steps=30)(Signs(), tiny_data, 0, seed=0)
        for weight in (0.0, 300.0)
    )
    variations = [total_variation(each["image"][None].float()).item() for each in (smooth, rough)]
    assert variations[0] < 0.5 * variations[1]
    assert smooth["activation"] < rough["activation"]


def test_a_part_is_a_function_of_seed_and_unit(tiny_model: Classifier, tiny_data: DataSet) -> None:
    study = FeatureVisualisation(units=(5, 2), steps=3)
    first = study(tiny_model.eval(), tiny_data, 1, seed=0)
    again = study(tiny_model, tiny_data, 1, seed=0)
    assert study.parts(tiny_model, tiny_data) == 2 and first["unit"] == 2
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(study(tiny_model, tiny_data, 1, seed=1)["start"], first["start"])


def test_bad_input_is_a_line(tiny_model: Classifier, tiny_data: DataSet) -> None:
    model = tiny_model.eval()
    with pytest.raises(BastionError, match=r"no unit 8 in the layer penultimate, which has 8; choose from 0 to 7"):
        FeatureVisualisation(units=(0, 8)).parts(model, tiny_data)
    with pytest.raises(BastionError, match="which of its modules are residual blocks is not known"):
        FeatureVisualisation(layer=0).parts(model, tiny_data)
    with pytest.raises(
        BastionError, match="layer: which modules of Signs are residual blocks .* give a bastion Classifier"
    ):
        FeatureVisualisation(layer=0).parts(Signs(), tiny_data)
    with pytest.raises(BastionError, match="no block 3, the model has 3; choose from 0 to 2, or from -1 to -3"):
        FeatureVisualisation(layer=3).parts(small_vit(size=8).float(), tiny_data)
    pooled = nn.Sequential(nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(BastionError, match="Sequential runs no nn.Linear .* set `layer` to logits"):
        FeatureVisualisation().parts(pooled, tiny_data)
    with pytest.raises(BastionError, match=r"^s.layer: unknown layer 'logit'; did you mean 'logits'\?"):
        studies.build({"name": "feature-visualisation", "layer": "logit"}, "s")

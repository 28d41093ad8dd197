from __future__ import annotations

import pytest
import torch
from torch import nn

from bastion.models import Classifier, checkpoint
from bastion.studies.attention_lipschitz import AttentionLipschitz
from bastion.types import DataSet

SIZES = {"num_classes": 3, "img_size": 8}


def build(name: str, **options: int) -> Classifier:
    torch.manual_seed(0)
    model = checkpoint.build({"name": name, **SIZES, **options}, mean=(0.5,) * 3, std=(0.25,) * 3).eval()
    for name, parameter in model.named_parameters():
        if "qkv" in name or "qk" in name:
            nn.init.normal_(parameter, std=0.3)  # so that attention is not the mean of the tokens
    return model


@pytest.mark.parametrize("name", ["tiny/vit-cauchy", "vit/micro"])
def test_what_is_measured_is_the_jacobians_norm_and_below_the_bound(name: str, tiny_data: DataSet) -> None:
    model = build(name)
    study = AttentionLipschitz(images=2)
    assert study.parts(model, tiny_data) == len(model.blocks())
    facts = study(model, tiny_data, 1, seed=0)
    attention = next(each for each in model.blocks()[1].module.children() if "Attention" in type(each).__name__)
    seen = []
    hook = attention.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    with torch.no_grad():
        model(tiny_data.test.batch(range(2)).x)
    hook.remove()
    dense = torch.autograd.functional.jacobian(lambda z: attention(z[None])[0], seen[0][0])
    norm = torch.linalg.matrix_norm(dense.reshape(seen[0][0].numel(), -1), 2)
    assert facts["measured"][0] == pytest.approx(float(norm), rel=1e-3)
    assert facts["scaled"][2] == facts["measured"].max()  # at scale 1
    assert facts["residual"] <= 1e-4
    assert (facts["scaled"] <= facts["scaled_bound"]).all()
    assert facts["reached"] <= facts["domain"]
    assert facts["scaled_bound"][2] <= facts["bound"]


def test_layer_norm_bounds_the_domain(tiny_data: DataSet) -> None:
    """Without weight and bias all tokens have the length √D, up to the eps of the variance."""
    facts = AttentionLipschitz(images=1)(build("tiny/vit-cauchy"), tiny_data, 0, seed=0)
    assert facts["domain"] == pytest.approx(96**0.5)
    assert facts["reached"] == pytest.approx(96**0.5, rel=1e-3)


@pytest.mark.parametrize("name", ["tiny/xcit", "tiny/covit"])
def test_a_model_without_such_attention_has_no_numbers(name: str, tiny_data: DataSet) -> None:
    """So that it can stand in one table with those that have."""
    facts = AttentionLipschitz(images=2)(build(name), tiny_data, 0, seed=0)
    other = AttentionLipschitz(images=2)(build("tiny/vit-cauchy"), tiny_data, 0, seed=0)
    assert all(fact.isnan().all() and fact.shape == other[name].shape for name, fact in facts.items())

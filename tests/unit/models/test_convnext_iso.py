"""Isotropic ConvNeXts: sizes, what they compute, the authors' names."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from bastion import BastionError
from bastion.models import Classifier, complexity, models
from bastion.models.convnext_iso import RENAMES, IsotropicConvNeXt
from bastion.models.meta import meta


def _small(layer_scale: float | None = None) -> IsotropicConvNeXt:
    return IsotropicConvNeXt(8, 2, layer_scale, num_classes=3, patch_size=4).eval()


@pytest.mark.parametrize(
    ("size", "parameters", "gmacs"), [("s", 22_308_712, 4.29), ("b", 87_083_752, 16.9), ("l", 305_942_504, 59.7)]
)
def test_sizes_and_costs(size: str, parameters: int, gmacs: float) -> None:
    with meta():
        model = Classifier(models.build(f"convnext-iso/{size}"), (0.5,) * 3, (0.25,) * 3)
    assert complexity.parameters(model) == parameters
    assert complexity.macs(model) / 1e9 == pytest.approx(gmacs, abs=0.06)


@pytest.mark.parametrize(("width", "depth", "gain", "total"), [(768, 18, 0, 87_083_752), (1024, 36, 1, 305_942_504)])
def test_the_larger_sizes_are_those_of_arithmetic(width: int, depth: int, gain: int, total: int) -> None:
    """The sheet counts S alone; the authors print 87 M and 306 M. Only L has LayerScale."""
    block = (49 + 1) * width + 2 * width + (4 * width + 4) * width + (4 * width + 1) * width + gain * width
    assert 3 * 16**2 * width + width + depth * block + 2 * width + (width + 1) * 1000 == total


def test_it_computes_what_the_paper_says() -> None:
    network = _small(layer_scale=0.5)
    x = torch.randn(2, 3, 12, 12)
    maps = network.stem(x)
    for block in network.blocks:
        branch = F.conv2d(maps, block.conv_dw.weight, block.conv_dw.bias, padding=3, groups=8).movedim(1, -1)
        branch = F.layer_norm(branch, (8,), block.norm.weight, block.norm.bias, 1e-6)
        branch = F.gelu(branch @ block.mlp.fc1.weight.T + block.mlp.fc1.bias) @ block.mlp.fc2.weight.T
        maps = maps + 0.5 * (branch + block.mlp.fc2.bias).movedim(-1, 1)
    expected = network.head(F.layer_norm(maps.mean((2, 3)), (8,), eps=1e-6))
    assert torch.allclose(network(x), expected, atol=1e-6)


def test_small_sizes_have_no_layer_scale() -> None:
    assert not any("gamma" in name for name, _ in _small().named_parameters())


def test_weights_begin_small_and_biases_at_zero() -> None:
    network = models.build({"name": "convnext-iso/s", "num_classes": 2}).network
    for module in (network.stem, network.blocks[0].conv_dw, network.blocks[0].mlp.fc1):
        assert module.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert not module.bias.any()


def test_the_authors_names_become_ours() -> None:
    ours = [name for name in _small(1e-6).state_dict() if name.startswith("blocks")]
    theirs = [
        name.replace("conv_dw", "dwconv").replace("mlp.fc1", "pwconv1").replace("mlp.fc2", "pwconv2") for name in ours
    ]
    assert theirs[1:4] == ["blocks.0.dwconv.weight", "blocks.0.dwconv.bias", "blocks.0.norm.weight"]
    for pattern, to in RENAMES:
        theirs = [re.sub(f"^{pattern}$", to, name) for name in theirs]
    assert theirs == ours


def test_patches_must_fit() -> None:
    with pytest.raises(BastionError, match="32 cannot be cut into patches of 12"):
        models.build({"name": "convnext-iso/s", "img_size": 32, "patch_size": 12})

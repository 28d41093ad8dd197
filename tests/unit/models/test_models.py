"""Model families: sizes, stems, timm by name."""

from __future__ import annotations

import pytest
import torch

from bastion import BastionError
from bastion.models import checkpoint, complexity, models


def test_vit_micro_has_the_parameters_that_arithmetic_gives() -> None:
    d, tokens = 128, 64
    block = 2 * 2 * d + (d * 3 * d + 3 * d) + (d * d + d) + (d * 4 * d + 4 * d) + (4 * d * d + d)
    expected = (3 * 16 * d + d) + tokens * d + 6 * block + 2 * d + (d * 10 + 10)
    assert complexity.parameters(models.build("vit/micro").network) == expected == 1_205_642


def test_macs_of_a_vit_are_those_of_its_matrix_products() -> None:
    model = checkpoint.build({"name": "vit/micro", "depth": 1}, mean=(0.0,) * 3, std=(1.0,) * 3)
    d, n = 128, 64
    products = n * 48 * d + n * d * 3 * d + 2 * n * n * d + n * d * d + 2 * n * d * 4 * d + d * 10
    assert complexity.macs(model) == products


def test_the_convolutional_stem_sees_beyond_its_patch() -> None:
    """A pixel just left of a patch's border moves the token right of it; with a patch stem it cannot."""
    x = torch.zeros(1, 3, 32, 32)
    y = x.clone()
    y[..., 16, 15] = 1.0
    for stem, reaches in (((), False), ((16, 32), True)):
        embed = models.build({"name": "vit/micro", "stem": stem}).network.patch_embed
        moved = (embed(x) != embed(y)).any(-1).view(8, 8)
        assert bool(moved[4, 4]) is reaches
        assert moved[4, 3]


@pytest.mark.parametrize(
    ("spec", "shape", "classes"),
    [
        ({"name": "timm/vit_tiny_patch16_224"}, (3, 224, 224), 1000),
        ({"name": "timm/vit_tiny_patch16_224", "img_size": 32, "patch_size": 4, "num_classes": 10}, (3, 32, 32), 10),
        ({"name": "timm/resnet10t", "in_chans": 1, "num_classes": 5}, (1, 176, 176), 5),
    ],
)
def test_timm_models_by_name_with_their_own_arguments(
    spec: dict[str, object], shape: tuple[int, ...], classes: int
) -> None:
    backbone = models.build(spec)
    assert backbone.shape == shape
    assert backbone.network.eval()(torch.rand(1, *shape)).shape == (1, classes)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("vit/mirco", "unknown model 'vit/mirco'; did you mean 'vit/micro'"),
        ("timm/vit_tiny_patch16_225", "has no 'vit_tiny_patch16_225'; did you mean 'vit_tiny_patch16_224'"),
        ({"name": "timm/resnet18", "patch": 4}, "timm cannot make 'resnet18' with {'patch': 4, "),
        ({"name": "vit/micro", "stem": [8]}, "1 convolutions of stride 2 make patches of 2, not 4"),
        ({"name": "vit/micro", "deph": 8}, "model.deph: unknown key; did you mean 'depth'"),
        ({"depth": 8}, "expected one model as {name: …}"),
    ],
)
def test_what_cannot_be_built_says_why(spec: object, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        models.build(spec)

"""BoTNet for small images."""

from __future__ import annotations

import pytest
import torch

from bastion import BastionError
from bastion.models import complexity, models
from bastion.models.botnet import MHSA
from bastion.models.classifier import Classifier
from bastion.models.meta import meta

cifar_botnet = models.factory("cifar/botnet")
tiny_botnet = models.factory("tiny/botnet")


def test_parameters_are_those_of_the_paper() -> None:
    with meta():
        assert complexity.parameters(cifar_botnet().network) == 18_827_082
        assert complexity.parameters(tiny_botnet().network) <= 1_500_000


def test_attention_is_of_content_and_of_rows_and_columns() -> None:
    torch.manual_seed(0)
    attention, x = MHSA(8, 3, heads=2), torch.randn(2, 8, 3, 3)
    q, k, v = (layer(x).view(2, 2, 4, 3, 3) for layer in (attention.query, attention.key, attention.value))
    expected = torch.empty(2, 2, 4, 3, 3)
    for image in range(2):
        for head in range(2):
            for row in range(3):
                for column in range(3):
                    place = attention.rel_h[head, :, :, 0][:, :, None] + attention.rel_w[head, :, 0][:, None]
                    ask = q[image, head, :, row, column]
                    scores = torch.einsum("c,cij->ij", ask, k[image, head] + place)
                    weights = scores.flatten().softmax(0).view(3, 3)
                    expected[image, head, :, row, column] = (weights * v[image, head]).sum((1, 2))
    assert torch.allclose(attention(x), expected.flatten(1, 2), atol=1e-5)


@pytest.mark.parametrize("size", [32, 224])
def test_the_last_stage_attends_before_and_after_it_halves_the_map(size: int) -> None:
    with meta():
        model = Classifier(cifar_botnet(img_size=size), (0.5,) * 3, (0.5,) * 3).eval()
        with model.tap("attention", "blocks") as taps:
            assert model(torch.empty(1, 3, size, size)).shape == (1, 10)
    tokens = [(size // 4) ** 2, (size // 8) ** 2, (size // 8) ** 2]
    assert [tuple(each.shape) for each in taps.attention.values()] == [(1, 4, n, n) for n in tokens]
    assert list(taps.attention) == ["layer4.0", "layer4.1", "layer4.2"]
    assert taps.blocks["layer4.0"].shape == (1, 2048, size // 8, size // 8)


def test_positions_are_not_decayed() -> None:
    undecayed = tiny_botnet().network.no_weight_decay()
    assert undecayed == {f"layer4.{place}.rel_{axis}" for place in ("0.conv2.0", "1.conv2") for axis in "hw"}


def test_maps_that_cannot_be_halved_are_refused() -> None:
    with pytest.raises(BastionError, match="multiple of 8, got 36"):
        models.build({"name": "tiny/botnet", "img_size": 36})

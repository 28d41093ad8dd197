"""CaiT: size of the thesis, talking heads, class attention."""

from __future__ import annotations

import pytest
import torch

from bastion import BastionError
from bastion.models import Classifier, complexity, models
from bastion.models.meta import meta


def test_size_and_cost_are_those_of_the_thesis() -> None:
    with meta():
        model = Classifier(models.build("cait/s12"), (0.5,) * 3, (0.25,) * 3).requires_grad_(False)
    assert complexity.parameters(model) == 25_611_688
    assert complexity.macs(model) / 1e9 == pytest.approx(4.75, abs=0.0051)
    assert model.network.pos_embed.shape == (1, 196, 384)


def test_heads_talk_before_and_after_the_softmax() -> None:
    attention = models.build("tiny/cait").network.blocks[0].attn.eval()
    with torch.no_grad():
        for module in (attention.qkv, attention.proj_l, attention.proj_w):
            module.weight.normal_()
    x = torch.randn(2, 5, 96)
    q, k, v = (each.view(2, 5, 4, 24) for each in attention.qkv(x).chunk(3, dim=-1))
    scores = [q[:, :, head] @ k[:, :, head].transpose(1, 2) / 24**0.5 for head in range(4)]
    maps = [_mixed(scores, attention.proj_l, head).softmax(-1) for head in range(4)]
    values = [_mixed(maps, attention.proj_w, head) @ v[:, :, head] for head in range(4)]
    assert torch.allclose(attention(x), attention.proj(torch.cat(values, -1)), atol=1e-4)


def _mixed(heads: list[torch.Tensor], linear: torch.nn.Linear, to: int) -> torch.Tensor:
    total = linear.bias[to].expand_as(heads[0])
    for weight, head in zip(linear.weight[to], heads, strict=True):
        total = total + weight * head
    return total


def test_layer_scale_begins_at_a_tenth_and_there_are_two_blocks_of_class_attention() -> None:
    model = Classifier(models.build("tiny/cait"), (0.5,) * 3, (0.25,) * 3).eval()
    blocks = [*model.network.blocks, *model.network.blocks_token_only]
    assert len(blocks) == 6
    assert all(torch.equal(block.gamma_1, torch.full((96,), 0.1)) for block in blocks)
    with torch.no_grad(), model.tap("attention") as taps:
        model(torch.rand(2, 3, 32, 32))
    assert taps.attention["blocks.3"].shape == (2, 4, 64, 64)
    assert taps.attention["blocks_token_only.1"].shape == (2, 4, 1, 65)


def test_the_tiny_one_is_small_and_patches_must_fit() -> None:
    assert complexity.parameters(models.build("tiny/cait").network) <= 1_500_000
    with pytest.raises(BastionError, match="30 cannot be cut into patches of 4"):
        models.build({"name": "tiny/cait", "img_size": 30})

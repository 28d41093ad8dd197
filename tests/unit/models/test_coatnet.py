"""CoAtNet: sizes of all combinations, attention with relative positions, halving."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bastion.models import complexity, models
from bastion.models.classifier import Classifier
from bastion.models.coatnet import MBConvBlock, RelativeAttention, TransformerBlock
from bastion.models.meta import meta

cifar_coatnet = models.factory("cifar/coatnet")
tiny_coatnet = models.factory("tiny/coatnet")

COUNTS = {
    "CCTT": 16_997_816,
    "CCTC": 16_656_808,
    "CTTT": 17_364_176,
    "CTTC": 17_023_168,
    "CCCC": 16_022_848,
    "CCCT": 16_363_856,
    "CTCC": 16_389_208,
    "CTCT": 16_730_216,
}


@pytest.mark.parametrize(("stages", "expected"), COUNTS.items())
def test_it_has_the_parameters_of_the_paper(stages: str, expected: int) -> None:
    with meta():
        assert complexity.parameters(cifar_coatnet(stages=stages).network) == expected


@pytest.mark.parametrize("stages", ["CCTT", "TTTT", "TCTC"])
def test_the_small_one_is_small(stages: str) -> None:
    with meta():
        assert complexity.parameters(tiny_coatnet(stages=stages).network) <= 1_500_000


@pytest.mark.parametrize(("img_size", "sides"), [(32, [16, 8, 4, 2, 1]), (224, [112, 56, 28, 14, 7])])
def test_every_stage_halves_the_map(img_size: int, sides: list[int]) -> None:
    with meta():
        network = cifar_coatnet(img_size=img_size).network.eval()
        x = network.stem(torch.empty(2, 3, img_size, img_size))
        found = [x.shape[-1]]
        for stage in network.stages:
            x = stage(x)
            found.append(x.shape[-1])
        assert found == sides
        assert network(torch.empty(2, 3, img_size, img_size)).shape == (2, 10)


def test_attention_adds_a_bias_of_the_offset() -> None:
    grid, dim, heads = 3, 12, 8
    attention, x = RelativeAttention(dim, 5, grid).double(), torch.randn(2, grid**2, dim).double()
    table = attention.rel_pos.relative_position_bias_table
    nn.init.normal_(table)
    q, k, v = attention.qkv(x).chunk(3, dim=-1)
    outputs = []
    for head in range(heads):
        part = slice(32 * head, 32 * head + 32)
        logits = q[..., part] @ k[..., part].transpose(1, 2) / 32**0.5
        for i in range(grid**2):
            for j in range(grid**2):
                rows, columns = i // grid - j // grid, i % grid - j % grid
                logits[:, i, j] = logits[:, i, j] + table[(rows + 2) * 5 + columns + 2, head]
        outputs.append(logits.softmax(-1) @ v[..., part])
    torch.testing.assert_close(attention(x), attention.proj(torch.cat(outputs, -1)))


def test_the_skip_of_a_halving_block_is_pooled_by_the_maximum() -> None:
    x = torch.randn(2, 8, 6, 6)
    pooled = nn.functional.max_pool2d(x, 3, 2, padding=1)
    mb, transformer = MBConvBlock(8, 4, 3, halves=True).eval(), TransformerBlock(8, 4, 3, halves=True).eval()
    for silent in (mb.conv[-1], transformer.attn.proj, transformer.mlp.fc2):
        nn.init.zeros_(silent.weight)
        nn.init.zeros_(silent.bias)
    torch.testing.assert_close(mb(x), mb.skip[1](pooled))
    torch.testing.assert_close(transformer(x), transformer.skip(pooled))


def test_a_block_that_keeps_the_map_keeps_the_trunk() -> None:
    x = torch.randn(2, 8, 3, 3)
    block = TransformerBlock(8, 8, 3, halves=False)
    tokens = x.flatten(2).transpose(1, 2)
    tokens = tokens + block.attn(block.norm1(tokens))
    tokens = tokens + block.mlp(block.norm2(tokens))
    torch.testing.assert_close(block(x), tokens.transpose(1, 2).view(2, 8, 3, 3))
    mb = MBConvBlock(8, 8, 3, halves=False).eval()
    torch.testing.assert_close(mb(x), x + mb.conv(mb.norm(x)))


def test_only_stages_of_attention_leave_maps() -> None:
    model = Classifier(tiny_coatnet(stages="CTCT"), (0.5,) * 3, (0.25,) * 3).eval()
    with torch.no_grad(), model.tap("attention") as taps:
        model(torch.rand(2, 3, 32, 32))
    shapes = {name: tuple(attention.shape) for name, attention in taps.attention.items()}
    assert shapes == {
        **{f"stages.1.{i}": (2, 8, 64, 64) for i in range(2)},
        **{f"stages.3.{i}": (2, 8, 4, 4) for i in range(2)},
    }
    plain = Classifier(tiny_coatnet(stages="CCCC"), (0.5,) * 3, (0.25,) * 3)
    assert len(plain.blocks()) == 8 and not any(block.attention for block in plain.blocks())


@pytest.mark.parametrize("stages", ["CCT", "CCTTT", "CCtt", "CXTT", ""])
def test_stages_that_are_none_are_refused(stages: str) -> None:
    with pytest.raises(ValueError, match=f"stages must be four letters, each C or T, got '{stages}'"):
        cifar_coatnet(stages=stages)


def test_images_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="img_size must be a multiple of 32, got 48"):
        cifar_coatnet(img_size=48)

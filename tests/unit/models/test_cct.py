"""CCT: sizes, tokenizers, the norm on the trunk, pooling by attention."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bastion.models import complexity, models
from bastion.models.cct import CCTBlock, Tokenizer, Tokenizing
from bastion.models.meta import meta

cifar_cct = models.factory("cifar/cct")
tiny_cct = models.factory("tiny/cct")


def test_it_has_the_parameters_of_the_paper() -> None:
    with meta():
        assert complexity.parameters(cifar_cct().network) == 3_760_139
        assert complexity.parameters(tiny_cct().network) <= 1_500_000


@pytest.mark.parametrize(
    ("kind", "img_size", "side"), [("3x1", 32, 16), ("3x2", 32, 8), ("7x1", 32, 8), ("7x2", 32, 2), ("7x2", 224, 14)]
)
def test_a_tokenizer_makes_the_grid_that_it_says(kind: Tokenizing, img_size: int, side: int) -> None:
    with meta():
        tokenizer = Tokenizer(kind, img_size, 3, 16)
        assert tokenizer.grid_size == (side, side)
        assert tokenizer(torch.empty(2, 3, img_size, img_size)).shape == (2, side * side, 16)


def test_images_of_224_get_196_tokens_unless_the_tokenizer_is_named() -> None:
    with meta():
        network = cifar_cct(img_size=224).network.eval()
        assert network.pos_embed.shape == (1, 196, 256)
        assert network(torch.empty(2, 3, 224, 224)).shape == (2, 10)
        assert cifar_cct(img_size=224, tokenizer="3x1").network.pos_embed.shape == (1, 112 * 112, 256)


def test_the_second_norm_of_a_block_sits_on_the_trunk() -> None:
    block, x = CCTBlock(8, 2, 2.0, 0.1, 0.1).eval(), torch.randn(2, 5, 8)
    for parameter in (*block.attn.proj.parameters(), *block.mlp.fc2.parameters()):
        nn.init.zeros_(parameter)  # both branches are silent: what remains is the trunk
    torch.testing.assert_close(block(x), nn.functional.layer_norm(x, (8,)))


def test_tokens_are_pooled_by_a_softmax_of_one_score_each() -> None:
    network = tiny_cct().network.eval()
    x, normed = torch.rand(2, 3, 32, 32), []
    network.norm.register_forward_hook(lambda _, inputs, output: normed.append(output))
    logits = network(x)
    (tokens,) = normed
    score = tokens @ network.attention_pool.weight[0] + network.attention_pool.bias
    pooled = torch.stack([row.softmax(0) @ each for row, each in zip(score, tokens, strict=True)])
    torch.testing.assert_close(logits, network.head(pooled))


def test_blocks_are_dropped_more_often_the_deeper_they_are() -> None:
    with meta():
        rates = [block.drop_path.drop_prob for block in cifar_cct(drop_path_rate=0.3).network.blocks]
    assert rates == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3])


def test_images_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="img_size must be a multiple of 16 with the tokenizer 7x2, got 40"):
        cifar_cct(img_size=40, tokenizer="7x2")

"""CeiT: sizes, tokens of the stem's map, LeFF, attention over the class tokens of all layers."""

from __future__ import annotations

import pytest
import torch

from bastion.models import complexity, models
from bastion.models.ceit import CeiTBlock, ImageToTokens, LayerwiseClassAttention, LeFF
from bastion.models.meta import meta

cifar_ceit = models.factory("cifar/ceit")
tiny_ceit = models.factory("tiny/ceit")


def test_it_has_the_parameters_of_the_paper() -> None:
    with meta():
        assert complexity.parameters(cifar_ceit().network) == 5_562_634
        assert complexity.parameters(cifar_ceit(class_attention=True).network) == 5_859_082
        assert complexity.parameters(tiny_ceit().network) <= 1_500_000


@pytest.mark.parametrize(("img_size", "side"), [(32, 2), (64, 4), (224, 14)])
def test_tokens_are_patches_of_a_map_a_quarter_as_large(img_size: int, side: int) -> None:
    with meta():
        network = cifar_ceit(img_size=img_size, class_attention=True).network.eval()
        x = torch.empty(2, 3, img_size, img_size)
        assert network.patch_embed.grid_size == (side, side)
        assert network.patch_embed(x).shape == (2, side**2, 192)
        assert network.pos_embed.shape == (1, 1 + side**2, 192)
        assert network(x).shape == (2, 10)


def test_a_projection_of_a_patch_is_a_linear_layer_on_its_pixels() -> None:
    embed = ImageToTokens(64, 4, 3, 10).eval()
    x = torch.rand(1, 3, 64, 64)
    patch = embed.stem(x)[:, :, 8:12, 4:8]  # third row, second column of 4×4
    expected = embed.proj.weight.flatten(1) @ patch.flatten() + embed.proj.bias
    torch.testing.assert_close(embed(x)[0, 2 * 4 + 1], expected)


def test_leff_moves_a_token_by_its_neighbours_on_the_grid_only() -> None:
    leff = LeFF(4, (5, 5)).eval()
    x = torch.randn(1, 25, 4)
    y = x.clone()
    y[0, 12] += 1.0
    moved = (leff(x) != leff(y)).any(-1).view(5, 5)
    assert moved[1:4, 1:4].all()
    assert moved.sum() == 9


def test_the_class_token_bypasses_leff() -> None:
    block = CeiTBlock(8, 2, (2, 2)).eval()
    x = torch.randn(3, 5, 8)
    attended = x + block.attn(block.norm1(x))
    torch.testing.assert_close(block(x)[:, 0], attended[:, 0])
    assert not torch.allclose(block(x)[:, 1:], attended[:, 1:])


def test_class_attention_asks_with_the_last_layer_only() -> None:
    attention, tokens = LayerwiseClassAttention(8, num_heads=2), torch.randn(3, 5, 8)
    normed = attention.norm1(tokens)
    q, (k, v) = attention.q(normed), attention.kv(normed).chunk(2, -1)
    heads = []
    for part in (slice(0, 4), slice(4, 8)):
        weights = (q[:, -1:, part] @ k[..., part].transpose(1, 2) / 4**0.5).softmax(-1)
        heads.append((weights @ v[..., part])[:, 0])
    last = tokens[:, -1] + attention.proj(torch.cat(heads, -1))
    torch.testing.assert_close(attention(tokens), last + attention.mlp(attention.norm2(last)))


def test_images_that_patches_do_not_fill_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4 · patch_size.* got 40 and 4"):
        cifar_ceit(img_size=40)

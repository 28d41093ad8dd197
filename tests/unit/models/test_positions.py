"""Position embeddings and tables on another grid."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bastion.models.positions import fit_to_shape


def _plane(side: int, channels: int = 3) -> torch.Tensor:
    """(side * side, channels), linear in row and column: bicubic interpolation keeps it linear inside."""
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return torch.stack([row * (i + 1.0) - column for i in range(channels)], -1).flatten(0, 1) / side


def test_embeddings_grow_as_in_the_released_code() -> None:
    """The form of DINO, which the ConvStem paper evaluates with: by scale, not by size."""
    embedding = torch.randn(1, 1 + 14 * 14, 8)
    got = fit_to_shape("pos_embed", embedding, (1, 1 + 18 * 18, 8))
    grid = embedding[:, 1:].reshape(1, 14, 14, 8).permute(0, 3, 1, 2)
    wanted = F.interpolate(grid, scale_factor=(18.1 / 14, 18.1 / 14), mode="bicubic")
    assert got is not None
    assert torch.equal(got[:, :1], embedding[:, :1])
    assert torch.allclose(got[:, 1:], wanted.permute(0, 2, 3, 1).reshape(1, -1, 8))


def test_relative_tables_are_images_with_a_channel_for_each_head() -> None:
    table = torch.randn(13 * 13, 3)
    got = fit_to_shape("blocks.0.attn.relative_position_bias_table", table, (7 * 7, 3))
    image = table.T.reshape(1, 3, 13, 13)
    wanted = F.interpolate(image, (7, 7), mode="bicubic", antialias=True)
    assert got is not None
    assert torch.allclose(got, wanted.reshape(3, 49).T, atol=1e-6)
    same = fit_to_shape("rel_pos.relative_position_bias_table", image[0], (3, 7, 7))
    assert same is not None
    assert torch.allclose(same, wanted[0])


def test_pairs_are_interpolated_over_queries_and_keys() -> None:
    """A mask that is a product of a map of the query and one of the key."""
    query, key = _plane(4, 1)[:, 0], _plane(4, 1)[:, 0] ** 2
    got = fit_to_shape("attn.att_mask", torch.outer(query, key)[None], (1, 64, 64))
    each = [fit_to_shape("attention_biases", part[None], (1, 64)) for part in (query, key)]
    assert got is not None and each[0] is not None and each[1] is not None
    assert torch.allclose(got[0], torch.outer(each[0][0], each[1][0]), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("weight", (4, 4), (8, 8)),  # no positions
        ("pos_embed", (1, 16, 8), (1, 64, 9)),  # another width
        ("pos_embed", (1, 17, 8), (1, 64, 8)),  # a class token on one side only
        ("relative_position_bias_table", (24, 3), (49, 3)),  # not square
    ],
)
def test_what_is_no_matter_of_positions_is_left(name: str, old: tuple[int, ...], new: tuple[int, ...]) -> None:
    assert fit_to_shape(name, torch.zeros(old), new) is None

"""Swin for small images."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from bastion import BastionError
from bastion.models import checkpoint, complexity, models
from bastion.models.adapt import transfer
from bastion.models.classifier import Classifier
from bastion.models.meta import meta
from bastion.models.swin import Merge, Stage, WindowAttention

cifar_swin = models.factory("cifar/swin")
tiny_swin = models.factory("tiny/swin")


def test_parameters_are_those_of_the_paper() -> None:
    with meta():
        assert complexity.parameters(cifar_swin().network) == 27_428_086
        assert complexity.parameters(tiny_swin().network) <= 1_500_000


def test_merging_is_unfolding_and_a_linear_layer() -> None:
    merge, x = Merge(3, 5, 2), torch.randn(2, 3, 6, 4)
    patches = nn.functional.unfold(x, 2, stride=2).transpose(1, 2)  # (B, N, 3 · 4)
    assert torch.allclose(merge(x.permute(0, 2, 3, 1)).flatten(1, 2), merge.linear(patches), atol=1e-6)


def _by_hand(attention: WindowAttention, x: Tensor) -> Tensor:
    """Token by token: who is in the same window after the roll, and was not carried round the edge."""
    side, window, shift = x.shape[1], attention.window, attention.shift
    q, k, v = attention.qkv(x).unflatten(3, (3, attention.heads, -1)).unbind(3)  # (B, H, W, heads, d)
    mixed = torch.empty_like(q)
    places = list(product(range(side), repeat=2))
    for r, c in places:
        (rr, cc) = (r - shift) % side, (c - shift) % side  # where it is after the roll
        seen = []
        for a, b in places:
            aa, bb = (a - shift) % side, (b - shift) % side
            together = (rr // window, cc // window) == (aa // window, bb // window)
            # Within a window of the rolled map, what was not carried round is as far away as it was.
            if together and (aa - rr, bb - cc) == (a - r, b - c):
                seen.append((a, b))
        keys = torch.stack([k[:, a, b] for a, b in seen], 2)  # (B, heads, n, d)
        values = torch.stack([v[:, a, b] for a, b in seen], 2)
        bias = torch.stack([attention.table[a - r + window - 1, b - c + window - 1] for a, b in seen])
        scores = (q[:, r, c, :, None] * keys).sum(-1) / keys.shape[-1] ** 0.5 + bias
        mixed[:, r, c] = (scores.softmax(-1)[..., None] * values).sum(2)
    return attention.proj(mixed.flatten(3))


@pytest.mark.parametrize(("side", "shift"), [(4, 0), (4, 1), (2, 1)])
def test_attention_is_within_windows_and_not_round_the_edge(side: int, shift: int) -> None:
    torch.manual_seed(0)
    attention = WindowAttention(Stage(width=6, depth=1, heads=2, merge=1), side, window=2, shift=shift)
    x = torch.randn(3, side, side, 6)
    assert torch.allclose(attention(x), _by_hand(attention, x), atol=1e-6)


@pytest.mark.parametrize(("size", "sides"), [(32, (16, 16, 8, 4)), (224, (112, 112, 56, 28))])
def test_maps_are_of_windows(size: int, sides: tuple[int, ...]) -> None:
    with meta():
        model = Classifier(cifar_swin(img_size=size), (0.5,) * 3, (0.5,) * 3).eval()
        with model.tap("attention") as taps:
            assert model(torch.empty(2, 3, size, size)).shape == (2, 10)
    stages = zip(sides, (2, 2, 6, 2), (3, 6, 12, 24), strict=True)
    expected = [(2 * (side // 4) ** 2, heads, 16, 16) for side, depth, heads in stages for _ in range(depth)]
    assert [tuple(each.shape) for each in taps.attention.values()] == expected


def test_every_other_block_is_shifted() -> None:
    with meta():
        network = cifar_swin(window_size=2).network
    shifts = [module.shift for module in network.modules() if isinstance(module, WindowAttention)]
    assert shifts == [0, 1] * 6


def test_what_windows_do_not_divide_is_refused() -> None:
    with pytest.raises(BastionError, match="48 leaves stage 4 a side of 6, which windows of 4 do not divide"):
        models.build({"name": "cifar/swin", "img_size": 48})
    with pytest.raises(BastionError, match="window_size: must be 2 or more, got 1"):
        models.build({"name": "tiny/swin", "window_size": 1})


def test_another_window_gets_the_tables_interpolated() -> None:
    source, model = (
        checkpoint.build({"name": "tiny/swin", "window_size": window}, mean=(0.0,) * 3, std=(1.0,) * 3, seed=window)
        for window in (2, 4)
    )
    done = transfer(source, model)
    assert len(done.resized) == 8 and all(name.endswith("attn.table") for name in done.resized)
    first, wider = (each.network.layers[1].attn.table for each in (source, model))
    wanted = torch.nn.functional.interpolate(first[None, None], scale_factor=7.1 / 3, mode="bicubic")[0, 0]
    assert torch.allclose(wider, wanted, atol=1e-6)

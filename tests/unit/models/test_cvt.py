"""CvT: sizes, maps of the stages, attention on thinned keys."""

from __future__ import annotations

import pytest
import torch

from bastion.models import complexity, models
from bastion.models.cvt import ConvAttention
from bastion.models.meta import meta

cifar_cvt = models.factory("cifar/cvt")
tiny_cvt = models.factory("tiny/cvt")


def test_it_has_the_parameters_of_the_paper() -> None:
    with meta():
        assert complexity.parameters(cifar_cvt().network) == 19_547_466
        assert complexity.parameters(tiny_cvt().network) <= 1_500_000
        wider = (7 * 7 - 3 * 3) * 3 * 64  # the published first kernel
        assert complexity.parameters(cifar_cvt(img_size=224).network) == 19_547_466 + wider


@pytest.mark.parametrize(
    ("img_size", "patch_size", "sides"),
    [(32, None, [16, 8, 4]), (32, 1, [32, 16, 8]), (32, 4, [8, 4, 2]), (224, None, [56, 28, 14])],
)
def test_stages_have_the_maps_that_the_first_stride_gives(
    img_size: int, patch_size: int | None, sides: list[int]
) -> None:
    with meta():
        network = cifar_cvt(img_size=img_size, patch_size=patch_size).network.eval()
        x, found = torch.empty(1, 3, img_size, img_size), []
        for stage in network.stages:
            x = stage(x)
            found.append(x.shape[-1])
        assert found == sides
        assert network(torch.empty(2, 3, img_size, img_size)).shape == (2, 10)


def test_attention_is_between_all_queries_and_a_quarter_of_the_keys() -> None:
    attention, x = ConvAttention(6, num_heads=2).eval(), torch.randn(2, 6, 4, 4)
    q, (k, v) = attention.q(x).flatten(2), attention.kv(x).flatten(2).chunk(2, 1)
    assert k.shape == (2, 6, 4)
    heads = []
    for part in (slice(0, 3), slice(3, 6)):
        weights = (q[:, part].transpose(1, 2) @ k[:, part] / 3**0.5).softmax(-1)  # (B, 16, 4)
        heads.append(v[:, part] @ weights.transpose(1, 2))
    expected = attention.proj(torch.cat(heads, 1).view(2, 6, 4, 4))
    torch.testing.assert_close(attention(x), expected)


def test_images_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="img_size must be a multiple of 4 · patch_size, got 36 and 2"):
        cifar_cvt(img_size=36)

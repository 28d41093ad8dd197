"""MobileViT: sizes, strides, pixels of patches as tokens."""

from __future__ import annotations

import pytest
import torch

from bastion.models import complexity, models
from bastion.models.meta import meta
from bastion.models.mobilevit import MobileViTBlock, MV2Block, Stride, _merge, _split

cifar_mobilevit = models.factory("cifar/mobilevit")
tiny_mobilevit = models.factory("tiny/mobilevit")


def test_it_has_the_parameters_of_the_paper() -> None:
    with meta():
        assert complexity.parameters(cifar_mobilevit().network) == 5_003_120
        assert complexity.parameters(cifar_mobilevit(img_size=224).network) == 5_003_120
        assert complexity.parameters(tiny_mobilevit().network) <= 1_500_000


@pytest.mark.parametrize(
    ("img_size", "stride", "sides"),
    [(32, None, [16, 8, 4]), (224, None, [56, 28, 14]), (256, 32, [32, 16, 8])],
)
def test_transformers_run_on_the_maps_that_the_stride_gives(
    img_size: int, stride: Stride | None, sides: list[int]
) -> None:
    with meta():
        network = cifar_mobilevit(img_size=img_size, stride=stride).network.eval()
        x, found = network.stem(network.conv1(torch.empty(2, 3, img_size, img_size))), []
        for block in network.trunk:
            x = block(x)
            found += [x.shape[-1]] if isinstance(block, MobileViTBlock) else []
        assert found == sides
        assert network(torch.empty(2, 3, img_size, img_size)).shape == (2, 10)


def test_tokens_are_the_pixels_at_one_place_of_every_patch() -> None:
    x = torch.arange(2 * 3 * 4 * 6).view(2, 3, 4, 6)
    tokens = _split(x)
    assert tokens.shape == (2 * 4, 2 * 3, 3)
    for image in range(2):
        for row in range(4):
            for column in range(6):
                place, patch = 2 * (row % 2) + column % 2, 3 * (row // 2) + column // 2
                assert torch.equal(tokens[4 * image + place, patch], x[image, :, row, column])
    assert torch.equal(_merge(tokens, x.shape), x)


def test_an_mv2_block_skips_only_where_the_shape_stays() -> None:
    x = torch.randn(1, 4, 6, 6)
    for after, stride, skips in ((4, 1, True), (4, 2, False), (8, 1, False)):
        block = MV2Block(4, after, stride, expansion=2).eval()
        torch.testing.assert_close(block(x), block.conv(x) + x if skips else block.conv(x))


@pytest.mark.parametrize(("img_size", "stride", "step"), [(32, 32, 64), (224, 32, 64), (40, None, 16), (240, None, 32)])
def test_maps_that_patches_do_not_fill_are_refused(img_size: int, stride: Stride | None, step: int) -> None:
    with pytest.raises(ValueError, match=f"img_size must be a multiple of {step}, .*patches of 2×2; got {img_size}"):
        cifar_mobilevit(img_size=img_size, stride=stride)

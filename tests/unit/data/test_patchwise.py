"""RVT's patch-wise augmentation: each patch by itself, as often as the shares say, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bastion import BastionError
from bastion.data.augment import TrainingTransform
from bastion.data.patchwise import PatchTransform, patch_size
from bastion.recipe import Augment, Patchwise, load_recipe
from bastion.types import DataSet

OFF = {"crop": 0.0, "noise": 0.0, "hflip": 0.0}


def _apply(x: Tensor, size: int = 4, seed: int = 0, first: int = 0, draw: int = 0, **settings: Any) -> Tensor:
    index = torch.arange(first, first + len(x))
    return PatchTransform(Patchwise(**settings), size)(x, index, seed=seed, draw=torch.full_like(index, draw))


def _images(count: int, side: int = 32, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(1), dtype=dtype)


def _changed(x: Tensor, y: Tensor, size: int = 4) -> Tensor:
    """(B, rows, columns) bool: which patches have a pixel that changed."""
    return torch.nn.functional.max_pool2d((x != y).any(1, keepdim=True).float(), size)[:, 0].bool()


def _within(found: float, share: float, n: int) -> bool:
    """Four standard deviations of a binomial."""
    return abs(found - share) < 4 * math.sqrt(share * (1 - share) / n)


@pytest.mark.parametrize("settings", [OFF, {"prob": 0.0, "crop": 1.0, "noise": 1.0, "hflip": 1.0}])
def test_with_no_chance_nothing_changes(settings: dict[str, float]) -> None:
    x = _images(8)
    assert torch.equal(_apply(x, **settings), x)


def test_mirroring_every_patch_is_exact() -> None:
    x = _images(3, side=8)
    y = _apply(x, prob=1.0, **{**OFF, "hflip": 1.0})
    for row in (0, 4):
        for column in (0, 4):
            patch = slice(None), slice(None), slice(row, row + 4), slice(column, column + 4)
            assert torch.equal(y[patch], x[patch].flip(-1))


@pytest.mark.parametrize("kind", ["crop", "noise", "hflip"])
@pytest.mark.parametrize("share", [0.1, 0.6])
def test_patches_change_as_often_as_the_share_says(kind: str, share: float) -> None:
    """2,560 patches, each by itself: neighbours change together as often as chance has it."""
    x = _images(40)
    changed = _changed(x, _apply(x, prob=1.0, **{**OFF, kind: share})).float()
    assert changed.shape == (40, 8, 8)
    assert _within(changed.mean().item(), share, changed.numel())
    for one, other in ((changed[:, :, 1:], changed[:, :, :-1]), (changed[:, 1:], changed[:, :-1])):
        assert _within((one * other).mean().item(), share * share, one.numel())
    assert _within((changed[1:] * changed[:-1]).mean().item(), share * share, changed[1:].numel())


def test_the_three_changes_are_drawn_apart() -> None:
    x = _images(40)
    masks = [_changed(x, _apply(x, prob=1.0, **{**OFF, kind: 0.3})).float() for kind in OFF]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert _within((masks[one] * masks[other]).mean().item(), 0.09, masks[one].numel())
    together = _changed(x, _apply(x, prob=1.0, **dict.fromkeys(OFF, 0.3)))
    assert torch.equal(together, sum(masks) > 0)  # by the same draws, whatever else is done


def test_half_of_the_images_are_left_alone() -> None:
    x = _images(400, side=8)
    changed = _changed(x, _apply(x, size=2, noise=1.0)).flatten(1)
    assert torch.equal(changed.any(1), changed.all(1))
    assert _within(changed.any(1).float().mean().item(), 0.5, 400)


def test_a_crop_of_a_ramp_is_the_ramp_of_its_part() -> None:
    """Where a pixel is as bright as its column, that of a square of side s at l is s · (column + 1/2) + l - 1/2."""
    ramp = (torch.arange(16, dtype=torch.float64) / 16).expand(5, 3, 16, 16)
    for turned in (False, True):
        x = (ramp.mT if turned else ramp).contiguous()
        y = _apply(x, size=16, prob=1.0, scale=(0.49, 0.49), **{**OFF, "crop": 1.0})
        line = (y.mT if turned else y).mean(2)[:, 0]
        steps = (line[:, 1:] - line[:, :-1]) * 16
        inside = (line[:, :-1] > 0) & (line[:, 1:] < 15 / 16)
        assert torch.allclose(steps[inside], torch.tensor(0.7, dtype=torch.float64), atol=1e-6)
        start = line[:, 8] * 16 - 0.7 * 8.5 + 0.5
        assert (start > -1e-6).all() and (start < 0.3 * 16 + 1e-6).all() and start.std() > 0.3


def test_crops_keep_between_the_given_parts_of_the_area() -> None:
    ramp = (torch.arange(16, dtype=torch.float64) / 16).expand(300, 3, 16, 16).contiguous()
    y = _apply(ramp, size=16, prob=1.0, **{**OFF, "crop": 1.0})
    area = ((y[:, 0, 0, 9] - y[:, 0, 0, 6]) * 16 / 3) ** 2
    assert 0.85 <= area.min() < 0.86 and 0.99 < area.max() <= 1 and abs(area.mean() - 0.925) < 0.01


def test_noise_is_gaussian_in_pixel_units_and_stays_inside() -> None:
    grey = torch.full((50, 3, 32, 32), 0.5)
    noise = _apply(grey, prob=1.0, **{**OFF, "noise": 1.0}) - 0.5
    assert abs(noise.mean()) < 1e-4 and abs(noise.std() - 0.01) < 1e-4
    assert abs((noise.abs() < 0.01).float().mean() - 0.6827) < 0.005
    assert len(noise.flatten(1).unique(dim=0)) == 50
    for edge in (0.0, 1.0):
        y = _apply(torch.full((4, 3, 8, 8), edge), prob=1.0, noise=1.0, sigma=0.5, crop=1.0)
        assert y.min() >= 0 and y.max() <= 1 and y.std() > 0.1


def test_an_image_depends_on_seed_number_and_draw_alone() -> None:
    x = _images(12)
    often = dict.fromkeys(OFF, 0.5)
    whole = _apply(x, **often)
    assert torch.equal(torch.cat([_apply(x[i : i + 1], first=i, **often) for i in range(12)]), whole)
    for other in ({"seed": 1}, {"draw": 1}, {"first": 1}):
        assert not torch.equal(_apply(x, **often, **other), whole)


def test_the_batch_itself_is_left_alone() -> None:
    x = _images(4, side=8)
    before = x.clone()
    _apply(x, size=8, prob=1.0, **dict.fromkeys(OFF, 1.0))
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("sides", "size"),
    [((224, 224), 16), ((32, 32), 4), ((28, 28), 4), ((64, 64), 8), ((96, 96), 12), ((160, 240), 16), ((21, 15), None)],
)
def test_the_size_suits_the_image(sides: tuple[int, int], size: int | None) -> None:
    if size:
        assert patch_size(None, *sides) == size
    else:
        with pytest.raises(BastionError, match=r"augment.patchwise.size: no patches of .* tile an image of 21×15"):
            patch_size(None, *sides)


@pytest.mark.parametrize("size", [5, 16])
def test_a_size_that_does_not_tile_is_an_error(tiny_data: DataSet, size: int) -> None:
    with pytest.raises(BastionError, match=f"size: patches of {size}×{size} pixels do not tile an image of 8×8"):
        TrainingTransform(Augment(patchwise=Patchwise(size=size)), tiny_data)


def test_it_grows_with_a_progressive_recipe(tiny_data: DataSet) -> None:
    transform = TrainingTransform(Augment(patchwise=Patchwise(size=2), progressive=4), tiny_data)
    strengths = [transform.patchwise(epoch).strength for epoch in (0, 1, 4, 9)]  # type: ignore[union-attr]
    assert strengths == [0.0, 0.25, 1.0, 1.0]


def test_recipes_turn_it_on_and_keep_their_hash_without_it() -> None:
    plain = load_recipe("tiny/demo-standard")
    on = load_recipe("tiny/demo-standard", ("augment.patchwise={}",))
    assert plain.augment.patchwise is None and on.augment.patchwise == Patchwise()
    assert "patchwise" not in str(plain.model_dump(exclude_defaults=True)) and plain.hash() != on.hash()
    with pytest.raises(BastionError, match="augment.patchwise.scale: must be parts of a patch, at most 1"):
        load_recipe("tiny/demo-standard", ("augment.patchwise.scale=[0.5, 1.5]",))

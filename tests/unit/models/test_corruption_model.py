"""The corruption model of RSPC: its size, its mask, its straight-through gradient, and how a run gives it back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import QUICK
from tests.rival import Rival  # noqa: F401  (registers itself)
from torch import Tensor

from bastion import BastionError
from bastion.attacks.patch import PatchOcclusion
from bastion.models import checkpoint
from bastion.models.corruption_model import CorruptionModel, keep_mask, load_corruption_model
from bastion.patches import Grid
from bastion.training.trainer import train


def test_it_has_the_parameters_of_the_paper() -> None:
    model = CorruptionModel((3, 224, 224), 16)
    assert sum(parameter.numel() for parameter in model.parameters()) == 39_184
    assert not [name for name, _ in model.named_parameters() if "bias" in name]
    assert model(torch.rand(2, 3, 224, 224)).shape == (2, 196)


def test_it_is_a_convolution_gelu_and_a_linear_layer() -> None:
    torch.manual_seed(0)
    model, x = CorruptionModel((3, 8, 12), 4).double(), torch.rand(2, 3, 8, 12, dtype=torch.float64)
    weights, mix = model.score.weight[0], model.mix.weight
    for image, scores in zip(x, model(x), strict=True):
        patches = [(4 * image[:, i : i + 4, j : j + 4] - 2) * weights for i in (0, 4) for j in (0, 4, 8)]
        hidden = torch.stack([patch.sum() for patch in patches])
        gelu = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
        assert torch.allclose(scores, mix @ gelu, atol=1e-12)


@pytest.mark.parametrize(("side", "size", "count"), [(224, 16, 20), (32, 4, 7), (32, 8, 2)])
def test_a_tenth_of_the_patches_is_rounded_up_as_the_attack_does(side: int, size: int, count: int) -> None:
    model, x = CorruptionModel((3, side, side), size), torch.rand(2, 3, side, side)
    assert model.choose(x, 0.1).shape == (2, count)
    assert PatchOcclusion(size=size).count(model.grid) == count


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    share=st.floats(0.01, 1.0),
    values=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_exactly_so_many_patches_are_occluded_even_with_ties(
    rows: int, columns: int, share: float, values: int, seed: int
) -> None:
    grid = Grid(2 * rows, 2 * columns, 2)
    count = grid.share(share)
    scores = torch.randint(values, (3, grid.count), generator=torch.Generator().manual_seed(seed)).double()
    keep = keep_mask(scores, grid, count)
    patches = keep.unfold(2, 2, 2).unfold(3, 2, 2).reshape(3, grid.count, 4)
    assert (patches == patches[..., :1]).all()
    assert ((patches[..., 0] == 0).sum(1) == count).all()
    for row, kept in zip(scores, patches[..., 0].bool(), strict=True):
        assert not kept.any() or row[kept].max() <= row[~kept].min()
    assert torch.equal(keep == 0, grid.mask(grid.highest(scores, count)))


def test_the_gradient_goes_straight_through_with_the_sign_turned_and_clipped() -> None:
    """Of L = Σ a_p · M_p the mask's gradient is a; the score's is -a, at most 1 in size, for kept patches or not."""
    grid = Grid(4, 4, 2)
    scores = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64, requires_grad=True)
    slopes = torch.tensor([[0.5, -0.25, 3.0, -7.0]], dtype=torch.float64)
    keep = keep_mask(scores, grid, 1)
    per_patch = keep.unfold(2, 2, 2).unfold(3, 2, 2).sum((1, 4, 5)).flatten(1) / 4
    assert per_patch.tolist() == [[1, 0, 1, 1]]
    (slopes * per_patch).sum().backward()
    assert scores.grad is not None and scores.grad.tolist() == [[-0.5, 0.25, -1.0, 1.0]]
    scores.grad = None
    keep = keep_mask(scores, grid, 1, grad_scale=3.0)
    (slopes / 4 * keep.unfold(2, 2, 2).unfold(3, 2, 2).sum((1, 4, 5)).flatten(1)).sum().backward()
    assert scores.grad.tolist() == [[-1.0, 0.75, -1.0, 1.0]]  # scaled before it is clipped


def test_processes_that_average_their_gradients_clip_that_of_the_whole_batch() -> None:
    """Of the mean over four images, by one process or by two with two images each."""
    grid, slopes = Grid(4, 4, 2), torch.tensor([[9.0, -9.0, 1.0, -1.0]] * 4, dtype=torch.float64)

    def gradient(images: slice, processes: int) -> Tensor:
        scores = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)
        keep = keep_mask(scores[images], grid, 1, processes=processes)
        per_patch = keep.unfold(2, 2, 2).unfold(3, 2, 2).sum((1, 4, 5)).flatten(1) / 4
        (slopes[images] * per_patch).sum(1).mean().backward()
        assert scores.grad is not None
        return scores.grad

    both = (gradient(slice(0, 2), 2) + gradient(slice(2, 4), 2)) / 2
    assert torch.equal(both, gradient(slice(0, 4), 1))
    assert both[0].tolist() == [-1, 1, -0.25, 0.25]


def test_climbing_the_straight_through_gradient_occludes_what_harms_most() -> None:
    """Loss = what the occluded patches cost; after ascent the most costly patches have the highest scores."""
    grid, costs = Grid(4, 4, 2), torch.tensor([[0.1, 0.9, 0.2, 0.4]])
    scores = torch.zeros(1, 4, requires_grad=True)
    ascent = torch.optim.SGD([scores], lr=0.1, maximize=True)
    for _ in range(10):
        ascent.zero_grad()
        occluded = 1 - keep_mask(scores, grid, 1)
        (occluded.unfold(2, 2, 2).unfold(3, 2, 2).mean((1, 4, 5)).flatten(1) * costs).sum().backward()
        ascent.step()
    assert grid.highest(scores.detach(), 4).tolist() == [[1, 3, 2, 0]]


def test_scores_do_not_tie_in_half_precision() -> None:
    model, x = CorruptionModel((3, 32, 32), 4), torch.rand(4, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        half = model(x)
    assert half.dtype == torch.float32 and torch.equal(half, model(x))


@pytest.mark.parametrize("size", [0, 5, 64])
def test_patches_that_do_not_tile_the_image_are_refused(size: int) -> None:
    message = f"patch_size: patches of {size} pixels do not tile images of 32×48; of 1, 2, 4, 8, 16 do"
    with pytest.raises(BastionError, match=message):
        CorruptionModel((3, 32, 48), size)


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(BastionError, match=r"expected images of \(B, 3, 32, 32\), got \(2, 3, 16, 16\)"):
        CorruptionModel((3, 32, 32), 4)(torch.rand(2, 3, 16, 16))


@pytest.mark.parametrize("shape", [(3, 32, 48), (3, 32, 32)])
def test_it_comes_back_for_the_size_that_the_network_resizes_to(shape: tuple[int, int, int], tmp_path: Path) -> None:
    made, spec = CorruptionModel((3, 64, 64), 16), {"name": "vit/micro", "img_size": 64, "patch_size": 16}
    model = checkpoint.build(spec, mean=(0.5,) * 3, std=(0.25,) * 3, shape=shape, resize="bicubic")
    checkpoint.save(model, tmp_path, networks=made.state_dict())
    back, x = load_corruption_model(tmp_path), torch.rand(2, 3, 64, 64)
    assert back.grid == made.grid and torch.equal(back(x), made(x))


def test_one_from_before_its_size_was_stored_is_read_as_then(tmp_path: Path) -> None:
    made = CorruptionModel((3, 32, 48), 8)
    old = {name: tensor for name, tensor in made.state_dict().items() if name != "image_size"}
    spec = {"name": "resnet/micro", "widths": [8, 16], "depths": [1, 1]}
    model = checkpoint.build(spec, mean=(0.5,) * 3, std=(0.25,) * 3, shape=(3, 32, 48))
    checkpoint.save(model, tmp_path, networks=old)
    assert load_corruption_model(tmp_path).grid == made.grid
    fresh = CorruptionModel((3, 32, 48), 8)
    fresh.load_state_dict(old)  # a checkpoint to resume from
    assert torch.equal(fresh.mix.weight, made.mix.weight)


def test_one_that_does_not_fit_into_memory_is_refused_before_it_is_made() -> None:
    with pytest.raises(BastionError, match=r"patch_size: a corruption model of 1,048,576 patches of 1 pixels: needs"):
        CorruptionModel((3, 1024, 1024), 1)


def test_a_run_without_one_says_so(tmp_path: Path) -> None:
    run = train("base/micro", changes=QUICK, folder=tmp_path / "plain")
    with pytest.raises(BastionError, match="has no corruption model: its objective trained no network"):
        load_corruption_model(run.folder)
    rival = train("base/micro", changes=(*QUICK, "objective={name: rival}"), folder=tmp_path / "rival")
    with pytest.raises(BastionError, match="the networks of its objective are no corruption model for images of 3×32"):
        load_corruption_model(rival.folder)
    shutil.rmtree(rival.model)
    with pytest.raises(BastionError, match="this run has no model yet"):
        load_corruption_model(rival.folder)


@pytest.mark.parametrize("lost", ["removed", "damaged"])
def test_networks_beside_the_model_are_checked_and_come_back_on_resume(tmp_path: Path, lost: str) -> None:
    changes = (*QUICK, "objective={name: rival}")
    run = train("base/micro", changes=changes, folder=tmp_path / "run")
    named = checkpoint.read_card(run.model).networks
    assert named is not None
    path, before = checkpoint.weights_file(run.model, named), checkpoint.load_networks(run.model)
    if lost == "removed":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.raises(BastionError, match="no such file" if lost == "removed" else "damaged, or not the networks"):
        checkpoint.load_networks(run.model)
    train("base/micro", changes=changes, folder=tmp_path / "run", resume=True)
    after = checkpoint.load_networks(run.model)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert len(list(run.model.glob("*.safetensors"))) == 2


def test_networks_are_those_of_the_epoch_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.2, 0.9, 0.5])
    monkeypatch.setattr(
        "bastion.training.selection.Selection.validate", lambda self, model: {"val_clean": next(scores), "val_n": 1}
    )
    changes = (*QUICK, "objective={name: rival}", "schedule.epochs=3", "validate={when: end, choose: best}")
    run = train("base/micro", changes=changes, folder=tmp_path / "run")
    kept, epochs = (
        checkpoint.load_networks(run.model),
        [checkpoint.load_networks(run.epochs / f"0000{e}") for e in (1, 2)],
    )
    assert all(torch.equal(kept[name], tensor) for name, tensor in epochs[1].items())
    assert any(not torch.equal(kept[name], tensor) for name, tensor in epochs[0].items())

"""Accuracy under given masks: models that look at known patches, masks of a known corruption model."""

from __future__ import annotations

from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import unaccelerated
from tests.vits import right_batch, small_vit
from torch import Tensor, nn

from bastion import BastionError, Threat
from bastion.attacks.patch import PatchOcclusion
from bastion.measuring.runner import measure
from bastion.models import Classifier, checkpoint
from bastion.models.columns import take_columns
from bastion.models.corruption_model import CorruptionModel
from bastion.patches import Grid
from bastion.probes import probes
from bastion.probes.occlusion import Occlusion
from bastion.types import Batch, DataSet

SURE, UNSURE = 1 / (1 + np.exp(-4.0)), 1 / (1 + np.exp(4.0))


class Looks(nn.Module):
    """Says class 1 while none of these patches of 4×4 pixels has changed from white."""

    def __init__(self, *patches: int) -> None:
        super().__init__()
        self.patches, self.seen = patches, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        whole = Grid.of(x, 4).sums(x.mean(1)) == 16
        logit = torch.where(whole[:, list(self.patches)].all(1), 4.0, -4.0).to(x.dtype)
        return torch.stack([torch.zeros_like(logit), logit], 1)


def white(n: int, size: int = 16) -> Batch:
    return Batch(torch.arange(n), torch.ones(n, 3, size, size, dtype=torch.float64), torch.ones(n, dtype=torch.long))


@pytest.mark.parametrize("patches", [(5,), (0, 15), (1, 2, 3)])
def test_masks_hit_the_patches_that_matter_as_often_as_the_hypergeometric_distribution_says(
    patches: tuple[int, ...],
) -> None:
    probe = Occlusion(masks=250, share=0.25, size=4)  # 4 of 16 patches
    facts = probe(Looks(*patches), white(8), seed=0)
    missed = comb(16 - len(patches), 4) / comb(16, 4)
    right = facts["right_by_mask"].double()
    assert right.shape == (8, 250)
    assert float(right.mean()) == pytest.approx(missed, abs=4 * (missed * (1 - missed) / 2000) ** 0.5)
    assert torch.equal(facts["correct"], facts["right_by_mask"][:, 0])
    assert torch.allclose(facts["share_right"].double(), right.mean(1))
    confidence = UNSURE + (SURE - UNSURE) * right
    assert torch.allclose(facts["confidence_by_mask"].double(), confidence, atol=1e-3)
    assert torch.allclose(facts["confidence"].double(), confidence.mean(1))
    assert torch.allclose(facts["confidence_std"].double(), confidence.std(1, correction=0), atol=1e-6)
    assert facts["confidence_min"].tolist() == pytest.approx([UNSURE] * 8)
    assert facts["clean_correct"].all() and facts["clean_confidence"].tolist() == pytest.approx([SURE] * 8)


def test_an_occluded_image_may_be_right_where_the_clean_one_is_wrong() -> None:
    batch = white(4)._replace(y=torch.zeros(4, dtype=torch.long))
    facts = Occlusion(share=1.0, size=4)(Looks(0), batch, seed=0)
    assert not facts["clean_correct"].any() and facts["correct"].all()


def test_masks_are_the_draws_of_the_attack() -> None:
    batch = white(5)
    attacked = PatchOcclusion(share=0.25, size=4)(Looks(*range(16)), batch, Threat("linf", 1.0), seed=3)
    assert torch.equal(Occlusion(share=0.25, size=4)(Looks(0), batch, seed=3)["occluded"], attacked)


def test_zeros_instead_of_noise() -> None:
    shown = Occlusion(share=0.25, size=4, fill="zero")(Looks(0), white(3), seed=0)["occluded"]
    assert shown.unique().tolist() == [0, 1] and (shown == 0).flatten(1).sum(1).tolist() == [3 * 4 * 16] * 3


def test_masks_of_an_example_depend_on_neither_the_batch_nor_how_much_runs_at_once() -> None:
    model, probe = small_vit(), Occlusion(masks=7, share=0.25, size=4)
    batch = right_batch(model, n=6)
    whole = probe(unaccelerated(model, 64), batch, seed=1)
    for size in (1, 4):
        facts = probe(unaccelerated(model, size), batch, seed=1)
        part = probe(unaccelerated(model, size), batch.select(torch.tensor([4, 1])), seed=1)
        for name, fact in whole.items():
            assert torch.allclose(facts[name].double(), fact.double(), atol=1e-6), name
            assert torch.allclose(part[name].double(), fact[[4, 1]].double(), atol=1e-6), name
    assert not torch.equal(whole["occluded"], probe(model, batch, seed=2)["occluded"])


@pytest.mark.parametrize(
    ("n", "masks", "passes"), [(1, 100, [1, 25, 25, 25, 25]), (10, 3, [10, 20, 10]), (60, 1, [60, 25, 25, 10])]
)
def test_masks_go_through_the_model_in_full_batches_and_are_counted(n: int, masks: int, passes: list[int]) -> None:
    model = Looks(0)
    facts = Occlusion(masks=masks, size=4)(unaccelerated(model, 25), white(n), seed=0)
    assert model.seen[1:] == passes
    assert facts["forwards"].tolist() == [masks + 1] * n and facts["backwards"].tolist() == [0] * n


def test_facts_by_mask_are_stored_whatever_the_batches(
    tiny_data: DataSet, tiny_model: Classifier, tmp_path: Path
) -> None:
    suite = {
        "probes": {"occlusion": {"name": "occlusion", "masks": 6, "size": 4}},
        "aggregates": {"all": {"mean": ["occlusion"], "column": "share_right"}},
    }
    found = [
        measure(tiny_model, tiny_data, suite, folder=tmp_path / str(size), batch_size=size, keep=3) for size in (7, 40)
    ]
    columns = [facts.columns["occlusion/right_by_mask"] for facts in found]
    assert columns[0].shape == (40, 6) and columns[0].dtype == bool and np.array_equal(*columns)
    assert found[0].accuracies()["all"].value == pytest.approx(columns[0].mean())
    assert found[0].pictures("occlusion")["occluded"].shape == (3, 3, 8, 8)


def resizing(class_map: bool = False) -> Any:
    """A ViT for 16 pixels with tokens of 4, which brings images of 8 pixels to its size."""
    sizes = {"num_classes": 3, "img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    spec, grey = {"name": "vit/micro", **sizes}, (0.5,) * 3
    model = checkpoint.build(spec, mean=grey, std=grey, shape=(3, 8, 8), resize="bicubic").eval()
    return take_columns(model, 3, (2, 0), "two of its classes") if class_map else model


@pytest.mark.parametrize("name", ["occlusion", "patch-confidence", "attention-stability"])
@pytest.mark.parametrize(("size", "share"), [(2, 2 / 64), (4, 1 / 16), (8, 1 / 4), (None, 1 / 16)])
def test_random_patches_are_of_the_image_as_the_model_resizes_it(name: str, size: int | None, share: float) -> None:
    model = resizing()
    batch = Batch(torch.arange(20), torch.rand(20, 3, 8, 8), torch.zeros(20, dtype=torch.long))
    facts = probes.build({"name": name, "share": 0.02, "size": size})(model, batch, seed=0)
    assert torch.equal(facts["clean"], model.resized(batch.x).clamp(0, 1))
    changed = (facts["occluded"] != facts["clean"]).any(1).double()
    assert changed.mean().item() == pytest.approx(share, abs=1e-3)  # noise may equal a pixel
    patches = Grid.of(facts["clean"], size or 4).sums(changed)
    assert int((patches > 0).sum()) == 20 * (2 if size == 2 else 1)


def test_images_are_resized_behind_a_choice_of_classes_too() -> None:
    batch = Batch(torch.arange(2), torch.rand(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))
    assert Occlusion(size=4)(resizing(class_map=True), batch, seed=0)["occluded"].shape == (2, 3, 16, 16)


def test_facts_of_models_that_resize_are_measured_anew_and_others_kept(corrupting: str) -> None:
    plain, learned = Occlusion(size=4), Occlusion(size=4, corruption_model=corrupting)
    assert plain.revisions(small_vit()) == learned.revisions(resizing()) == plain.describe().revisions
    assert plain.revisions(resizing()) == plain.revisions(resizing(class_map=True)) == (*plain.describe().revisions, 2)


def test_a_model_without_attention_has_no_tokens_to_size_patches_by() -> None:
    with pytest.raises(BastionError, match="probe occlusion: size: this model has no self-attention"):
        Occlusion(size=None)(Looks(0), white(2), seed=0)


@pytest.fixture
def corrupting(tmp_path: Path) -> str:
    """A model folder with a corruption model for images of 16 pixels in patches of 4."""
    checkpoint.save(small_vit().float(), tmp_path / "run", networks=CorruptionModel((3, 16, 16), 4).state_dict())
    return str(tmp_path / "run")


class TestLearnedMasks:
    @pytest.fixture
    def corruption_model(self, tmp_path: Path) -> CorruptionModel:
        """Stored beside a model, as training does."""
        torch.manual_seed(0)
        made = CorruptionModel((3, 16, 16), 4)
        checkpoint.save(small_vit().float(), tmp_path / "run", networks=made.state_dict())
        return made

    def test_patches_are_those_with_the_highest_scores(self, corruption_model: CorruptionModel, tmp_path: Path) -> None:
        model = small_vit()
        batch = right_batch(model)
        probe = Occlusion(share=0.2, size=4, masks=2, corruption_model=str(tmp_path / "run"))
        shown = probe(model, batch, seed=0)["occluded"]
        grid = corruption_model.grid
        mask = grid.mask(grid.highest(corruption_model(batch.x.float()), 4))
        assert torch.equal((shown != batch.x).all(1, keepdim=True), mask)
        first, second = probe.occluded(batch, grid, [0, 1], seed=0).x.chunk(2)  # noise is fresh for each
        assert torch.equal(first, shown) and not torch.equal(first, second)
        assert torch.equal((second != batch.x).all(1, keepdim=True), mask)

    @pytest.mark.parametrize("name", ["occlusion", "patch-confidence", "attention-stability"])
    def test_images_that_the_model_resizes_are_occluded_at_its_size_as_in_training(
        self, name: str, tmp_path: Path
    ) -> None:
        model = resizing()
        torch.manual_seed(0)
        corruption_model = CorruptionModel((3, 16, 16), 4)
        checkpoint.save(model, tmp_path / "run", networks=corruption_model.state_dict())
        batch = Batch(torch.arange(5), torch.rand(5, 3, 8, 8), torch.zeros(5, dtype=torch.long))
        probe = probes.build({"name": name, "share": 0.2, "size": 4, "corruption_model": str(tmp_path / "run")})
        facts = probe(model, batch, seed=0)
        x = model.resized(batch.x).clamp(0, 1)
        grid = corruption_model.grid
        mask = grid.mask(corruption_model.choose(x, 0.2))
        assert torch.equal(facts["clean"], x)
        assert torch.equal((facts["occluded"] != x).all(1, keepdim=True), mask)

    def test_facts_are_of_the_corruption_model_as_it_is(
        self, corruption_model: CorruptionModel, tmp_path: Path
    ) -> None:
        options = {"name": "occlusion", "size": 4, "corruption_model": str(tmp_path / "run")}
        before = probes.build(options)
        changed = {name: tensor + 1 for name, tensor in corruption_model.state_dict().items()}
        checkpoint.save(small_vit().float(), tmp_path / "run", networks=changed)
        assert before != probes.build(options)
        with pytest.raises(BastionError, match="changed on the disk"):
            before(Looks(0), white(2), seed=0)

    def test_what_does_not_fit_is_one_line(self, corruption_model: CorruptionModel, tmp_path: Path) -> None:
        with pytest.raises(BastionError, match="has patches of 4 pixels, the probe of 8; set size=4"):
            Occlusion(corruption_model=str(tmp_path / "run"))(Looks(0), white(2), seed=0)
        checkpoint.save(small_vit().float(), tmp_path / "plain")
        with pytest.raises(BastionError, match="has no corruption model"):
            Occlusion(corruption_model=str(tmp_path / "plain"))

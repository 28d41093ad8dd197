"""Similarity of attention: hand-made maps, families with windows and channels, and what an occluded image changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import unaccelerated
from tests.vits import right_batch, small_vit
from torch import Tensor

from bastion import BastionError
from bastion.models import Classifier, checkpoint
from bastion.patches import Grid
from bastion.probes.attention_stability import AttentionStability, centre_attention, similarities
from bastion.types import Batch

HALF = 0.5**0.5


def build(name: str, **options: Any) -> Classifier:
    torch.manual_seed(0)
    model = checkpoint.build({"name": name, "num_classes": 3, **options}, mean=(0.5,) * 3, std=(0.25,) * 3)
    return model.eval()


def images(n: int, size: int) -> Batch:
    x = torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(1))
    return Batch(torch.arange(n), x, torch.zeros(n, dtype=torch.long))


def cosine(a: Tensor, b: Tensor) -> float:
    one, two = (each.double().flatten().numpy() for each in (a, b))
    return float(one @ two / np.sqrt((one @ one) * (two @ two)))


def test_hand_made_maps_have_their_cosines_and_missing_heads_are_nan() -> None:
    """Two images, the second layer with one head in two windows, under two masks."""
    identity, even = torch.eye(2), torch.full((2, 2), 0.5)
    swapped = identity.flip(0)
    first = torch.stack([identity, even]).expand(2, 1, 2, 2, 2)
    second = torch.stack([identity, identity]).view(1, 2, 1, 2, 2).expand(2, 2, 1, 2, 2)
    after_first = torch.stack([torch.stack([even, even]), torch.stack([swapped, even])])  # of each mask
    after_second = torch.stack([torch.stack([identity, swapped]), torch.stack([swapped, swapped])])
    found = similarities(
        {"a": first, "b": second},
        {
            "a": after_first.view(2, 1, 1, 2, 2, 2).expand(2, 2, 1, 2, 2, 2).flatten(0, 1),
            "b": after_second.view(2, 1, 2, 1, 2, 2).expand(2, 2, 2, 1, 2, 2).flatten(0, 1),
        },
    )
    assert found.shape == (2, 2, 2, 2)  # masks, images, layers, heads
    for image in range(2):
        assert found[0, image].flatten().tolist() == pytest.approx([HALF, 1, 0.5, np.nan], nan_ok=True)
        assert found[1, image].flatten().tolist() == pytest.approx([0, 1, 0, np.nan], nan_ok=True)


def test_nothing_occluded_is_similarity_one() -> None:
    model, black = small_vit(), torch.zeros(3, 3, 16, 16, dtype=torch.float64)
    batch = Batch(torch.arange(3), black, torch.zeros(3, dtype=torch.long))
    facts = AttentionStability(share=0.5, size=4, masks=3, fill="zero")(model, batch, seed=0)
    for name in ("similarity", "lowest", "similarity_by_head", "similarity_by_mask"):
        assert torch.allclose(facts[name], torch.ones(())), name
    assert torch.equal(facts["attention_clean"], facts["attention_occluded"])


VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}


@pytest.mark.parametrize(
    ("name", "options", "size"), [("timm/vit_tiny_patch16_224", VIT, 16), ("tiny/swin", {}, 32), ("tiny/xcit", {}, 32)]
)
def test_facts_are_the_cosines_of_the_tapped_maps(name: str, options: dict[str, Any], size: int) -> None:
    """Between tokens, in windows, and between channels, with class attention left out."""
    model, batch, probe = build(name, **options), images(1, size), AttentionStability(share=0.2, size=4, masks=2)
    attending = [block.name for block in model.blocks() if block.attends]

    def maps(x: Tensor) -> list[Tensor]:
        with torch.no_grad(), model.tap("attention") as taps:
            model(x)
        return [taps.attention[block] for block in attending]

    clean = maps(batch.x)
    heads = max(each.shape[1] for each in clean)
    cosines = np.full((2, len(attending), heads), np.nan)
    for mask in range(2):
        for layer, (a, b) in enumerate(
            zip(clean, maps(probe.occluded(batch, Grid.of(batch.x, 4), [mask], seed=7).x), strict=True)
        ):
            cosines[mask, layer, : a.shape[1]] = [cosine(a[:, head], b[:, head]) for head in range(a.shape[1])]
    facts = {name: fact[0].numpy() for name, fact in probe(model, batch, seed=7).items()}
    by_mask = np.nanmean(cosines, axis=(1, 2))
    assert facts["similarity_by_head"] == pytest.approx(cosines.mean(0), abs=1e-5, nan_ok=True)
    assert facts["similarity_by_mask"] == pytest.approx(by_mask, abs=1e-5)
    assert facts["similarity"] == pytest.approx(by_mask.mean(), abs=1e-5)
    assert facts["lowest"] == pytest.approx(by_mask.min(), abs=1e-5)
    assert ("attention_clean" in facts) == (name not in ("tiny/swin", "tiny/xcit"))  # over the whole image alone


def test_examples_and_masks_share_batches_without_an_effect_and_clean_images_run_once() -> None:
    model, probe = small_vit(), AttentionStability(share=0.25, size=4, masks=5)
    batch = right_batch(model, n=3)
    whole = probe(unaccelerated(model, 64), batch, seed=1)
    for size in (1, 2, 7):
        facts = probe(unaccelerated(model, size), batch, seed=1)
        assert facts["forwards"].tolist() == [6] * 3
        for name, fact in whole.items():
            assert torch.allclose(facts[name].double(), fact.double(), atol=1e-6), name


def test_the_query_in_the_middle_is_found_behind_the_class_token() -> None:
    """4 × 4 patches, of which number 10 is in the middle, and attends to patch 5 alone."""
    attention = torch.full((1, 1, 2, 17, 17), 1 / 17)
    attention[..., 1 + 10, :] = 0
    attention[..., 1 + 10, 1 + 5] = 1
    coarse = torch.full((1, 1, 2, 4, 4), 0.25)
    found = centre_attention([attention, coarse], torch.zeros(1, 3, 16, 16))
    expected = torch.zeros(4, 4)
    expected[1, 1] = 1
    assert found.shape == (1, 2, 4, 4)
    assert torch.equal(found[0, 0], expected) and torch.equal(found[0, 1], torch.full((4, 4), 0.25))


def test_a_model_without_attention_is_one_line(tiny_model: Classifier) -> None:
    cnn = build("resnet/micro")
    messages = "needs the attention maps", "which modules of .* are residual blocks is not known"
    for model, message in zip((cnn, tiny_model.eval().network), messages, strict=True):
        with pytest.raises(BastionError, match=f"^probe attention-stability: {message}") as caught:
            AttentionStability()(model, images(2, 32), seed=0)
        assert "\n" not in str(caught.value)

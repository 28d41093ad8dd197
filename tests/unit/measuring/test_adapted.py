"""Images of another size than the model's: adapted once per size, where the suite asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bastion import BastionError
from bastion.data import datasets
from bastion.measuring.runner import measure
from bastion.models import Classifier, checkpoint
from bastion.models.adapt import resized

SUITE: dict[str, Any] = {
    "adapt_size": True,
    "axes": {"size": {"set": {"data.size": 1, "probes.l2.threat.eps": 1 / 32}, "to": [12, 16, 24]}},
    "probes": {
        "clean": "accuracy",
        "l2": {"name": "adversarial", "threat": {"norm": "l2"}, "attack": {"name": "pgd", "steps": 2}},
    },
    "studies": {"cost": "complexity"},
}


@pytest.fixture
def folder(tmp_path: Path) -> dict[str, Any]:
    """Three pictures of 32×32 to test on in each of two classes, for a network of 16×16."""
    pixels = np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(6):
            path = tmp_path / "pictures" / split / f"class{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    return {"name": "imagefolder", "root": str(tmp_path / "pictures"), "size": 16}


@pytest.fixture
def vit() -> Classifier:
    spec = {"name": "vit/micro", "embed_dim": 16, "depth": 1, "num_heads": 2, "img_size": 16, "num_classes": 2}
    model = checkpoint.build(spec, mean=(0.5,) * 3, std=(0.25,) * 3, seed=0).eval()
    torch.nn.init.normal_(model.network.pos_embed, generator=torch.Generator().manual_seed(0))
    return model


def test_each_size_is_measured_with_positions_interpolated_for_it(
    vit: Classifier, folder: dict[str, Any], tmp_path: Path
) -> None:
    facts = measure(vit, folder, SUITE, folder=tmp_path / "run")
    assert [(case.label, case.adapted_to) for case in facts.about.cases if case.kind == "probes"] == [
        ("clean size=12", 12),
        ("clean size=16", None),
        ("clean size=24", 24),
        ("l2 size=12", 12),
        ("l2 size=16", None),
        ("l2 size=24", 24),
    ]
    for size in (12, 16, 24):
        x = datasets.build({**folder, "size": size}).test.batch(range(6)).x
        with torch.no_grad():
            predicted = (vit if size == 16 else resized(vit, size))(x).argmax(1)
        assert np.array_equal(facts.columns[f"clean size={size}/prediction"], predicted.numpy())
        threat = facts.case(f"l2 size={size}").threat
        assert threat is not None and threat.eps == pytest.approx(size / 32)
    assert "position embeddings were interpolated for images of 12, 24 pixels" in facts.table()


def test_a_suite_that_does_not_ask_for_it_is_refused_another_size(
    vit: Classifier, folder: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(BastionError, match="was made for images of 16×16 and does not take 12×12"):
        measure(vit, folder, {**SUITE, "adapt_size": False}, folder=tmp_path / "run")


def test_a_network_that_takes_any_size_is_left_as_it_is(
    tiny_model: Classifier, folder: dict[str, Any], tmp_path: Path
) -> None:
    tiny_model.network[-1], tiny_model.num_classes = torch.nn.Linear(8, 2), 2
    facts = measure(tiny_model, folder, SUITE, folder=tmp_path / "run")
    assert all(case.adapted_to is None for case in facts.about.cases) and "interpolated" not in facts.table()

"""Studies read no image that they do not declare, so stored facts are of the images as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.vits import small_vit

from bastion.data.arrays import ArraySplit
from bastion.studies import studies
from bastion.types import Batch, DataSet

SMALL: dict[str, dict[str, Any]] = {
    "attention-lipschitz": {"images": 2, "scales": [1.0]},
    "complexity": {"batch": 2, "repeats": 1},
    "feature-visualisation": {"units": [0, 1], "start": "image", "steps": 1, "layer": "logits"},
    "landscape": {"n": 4, "points": 3, "dimensions": 1},
    "rademacher": {"images": 4, "draws": 2},
    "sharpness": {"n": 4, "iterations": 2, "eigenvalues": 1, "probes": 2},
    "sparsity": {},
    "weight-norms": {"images": 4},
}


class Recording(ArraySplit):
    """A split that notes the positions of the images that are read."""

    seen: set[int]

    def batch(self, positions: Sequence[int]) -> Batch:
        self.seen.update(positions)
        return super().batch(positions)


def _recording(split: ArraySplit) -> Recording:
    found = Recording(split._images, split._labels, split.index)
    found.seen = set()
    return found


@pytest.mark.parametrize("name", studies.names())
def test_a_study_reads_only_images_that_it_declares(name: str, tiny_data: DataSet) -> None:
    splits = {each: _recording(tiny_data.split(each)) for each in ("train", "val", "test")}  # type: ignore[arg-type]
    data, model = replace(tiny_data, **splits), small_vit(size=8).float()
    study = studies.build({"name": name, **SMALL[name]})
    for part in range(study.parts(model, data)):
        study(model, data, part, seed=0)
    for split, recorded in splits.items():
        declared = study.reads.get(split, 0)
        assert recorded.seen <= set(range(len(recorded) if declared is None else declared))
    assert any(recorded.seen for recorded in splits.values()) == bool(study.reads)

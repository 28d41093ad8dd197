"""Loss curves as they have always been: a change of order, augmentation, attack or optimizer shows here first.

Remake on purpose: `python -m tests.golden.test_curves`.
"""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from tests.conftest import ADVERSARIAL, QUICK

from bastion.training.trainer import train

MADE_WITH = {"torch": "2.13.0", "timm": "1.0.30"}  # others draw other initial weights
FILE = Path(__file__).parent / "curves.json"
RUNS = {
    "standard": QUICK,
    "adversarial": (*QUICK, *ADVERSARIAL),
    "everything": (
        *QUICK,
        *ADVERSARIAL,
        "augment={crop: resized, auto_augment: rand-m9-mstd0.5-inc1, erasing: 0.25, mixup: 0.8, cutmix: 1}",
        "optimizer={name: sgd, lr: 0.05, momentum: 0.9}",
        "objective.attack={name: pgd, steps: 2, keep: last}",
        "objective.threat={norm: l2, eps: 0.5}",
        "objective.eps_warmup=1",
        "ema=0.9",
    ),
}


def curve(changes: tuple[str, ...], folder: Path) -> list[float]:
    torch.set_num_threads(1)
    records = train("base/micro", changes=changes, folder=folder).history()
    return [record["loss"] for record in records if record["kind"] == "step"]


@pytest.mark.skipif(
    any(version(name).partition("+")[0] != made for name, made in MADE_WITH.items()), reason=f"made with {MADE_WITH}"
)
@pytest.mark.parametrize("name", RUNS)
def test_losses_are_the_golden_ones(name: str, tmp_path: Path) -> None:
    golden = json.loads(FILE.read_text())[name]
    assert curve(RUNS[name], tmp_path / "run") == pytest.approx(golden, rel=1e-4)  # other processors round otherwise


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        curves = {name: curve(changes, Path(folder) / name) for name, changes in RUNS.items()}
    FILE.write_text(json.dumps(curves, indent=2) + "\n")

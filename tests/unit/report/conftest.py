"""Runs as training and measuring leave them, made through the real stores, with numbers known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bastion.measure.store import ProbeStore, blocks, write_measurement
from bastion.recipe import Recipe
from bastion.run import Run, create_run, environment

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
EPS = 8 / 255
N, BLOCK, KEEP = 200, 100, 16
PGD = "Adversarial(threat=Threat(norm='linf', eps=0.03137254901960784), attack=PGD(steps=20, rel_step=0.1))"

Column = np.ndarray[Any, Any]
MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """`make_run("robust", clean=0.47, robust=0.265)`: a trained and measured run in the test's folder."""

    def make(name: str, *, clean: float, robust: float, **changes: Any) -> Run:
        run = train_run(tmp_path / name, robust=robust)
        measure_run(run, clean=clean, robust=robust, **changes)
        return run

    return make


def train_run(folder: Path, *, robust: float, epochs: int = 12) -> Run:
    """A run with a recipe and a log; without robust numbers if `robust` is zero, as in standard training."""
    recipe = Recipe.model_validate(
        {
            "data": "cifar10-mini",
            "model": "vit/micro",
            "objective": "trades" if robust else "standard",
            "seed": 3,
        }
    )
    run = create_run(folder, seed=3, recipe=recipe)
    noise = np.random.default_rng(3)
    for step in range(20, 40 * epochs + 1, 20):
        time = step / (40 * epochs)
        record = {"kind": "step", "step": step, "epoch": step / 40, "loss": 0.9 + 1.5 * np.exp(-3 * time)}
        record["loss"] += noise.normal(0, 0.04)
        record["clean_accuracy"] = 0.1 + 0.4 * (1 - np.exp(-3 * time)) + noise.normal(0, 0.02)
        if robust:
            record["robust_accuracy"] = 0.1 + 0.2 * (1 - np.exp(-3 * time)) + noise.normal(0, 0.02)
        run.log(record)
        if step % 40 == 0:
            validation = {"val_clean": 0.1 + 0.38 * (1 - np.exp(-3 * time)), "val_n": 500}
            if robust:
                validation["val_robust"] = 0.1 + 0.17 * (1 - np.exp(-3 * time))
            run.log({"kind": "epoch", "step": step, "epoch": step // 40, **validation})
        if step == 240:
            run.log({"kind": "event", "step": step, "message": "resumed from checkpoint 240"})
    return run


def measure_run(
    run: Run,
    *,
    clean: float,
    robust: float,
    n: int = N,
    channels: int = 3,
    images: Column | None = None,
    classes: tuple[str, ...] = CLASSES,
    label: str = "pgd-20",
    norm: str = "linf",
    about: Mapping[str, Any] | None = None,
) -> None:
    """Facts of an accuracy probe and of an attack with exactly these accuracies, spread over the examples."""
    draw = np.random.default_rng(7)
    truth, other = draw.integers(0, len(classes), n), draw.integers(1, len(classes), n)
    mistaken = (truth + other) % len(classes)
    spread = np.argsort(draw.random(n))
    alive, survived = spread < round(clean * n), spread < round(robust * n)
    fooled = alive & ~survived
    x = smooth_pictures(n, channels) if images is None else images
    delta = np.where(alive[:, None, None, None], perturbations(n, x.shape[1]), 0)
    adversarial = np.clip(x + delta, 0, 1).astype(np.float32)
    common = {"index": np.arange(n), "label": truth}
    facts = {
        "clean": {**common, "correct": alive, "prediction": np.where(alive, truth, mistaken)},
        label: {
            **common,
            "correct": survived,
            "prediction": np.where(survived, truth, mistaken),
            "in_budget": np.ones(n, dtype=bool),
            "distance": np.where(fooled, EPS, np.nan).astype(np.float32),
        },
    }
    stores = {name: ProbeStore.open(run, {"probe": name, "n": n}) for name in facts}
    for block in blocks(n, BLOCK):
        rows = slice(block.start, block.stop)
        kept = slice(block.start, min(block.stop, KEEP))
        for name, columns in facts.items():
            pictures = {"clean": x[kept], "adversarial": adversarial[kept]}
            shown = pictures if name == label and block.start < KEEP else {}
            stores[name].write(block, {key: column[rows] for key, column in columns.items()}, shown)
    standard = {
        **environment(3),
        "model": run.name,
        "data": {"name": "cifar10-mini", "fingerprint": "f00d"},
        "classes": list(classes),
        "split": "test",
        "suite": "demo",
        "n": n,
        "block": BLOCK,
        "probes": {name: store.folder.name for name, store in stores.items()},
        "described": {"clean": "Accuracy()", label: PGD},
        "threats": {label: {"norm": norm, "eps": EPS}},
    }
    write_measurement(run, standard | dict(about or {}))


def smooth_pictures(n: int, channels: int, size: int = 32) -> Column:
    """(n, C, H, W) in [0,1]: a few slow waves each."""
    draw = np.random.default_rng(1)
    rows, columns = np.meshgrid(np.linspace(0, 1, size), np.linspace(0, 1, size), indexing="ij")
    pictures = np.full((n, channels, size, size), 0.5)
    for _ in range(4):
        frequency, phase = draw.normal(0, 5, (2, n, channels, 1, 1)), draw.uniform(0, 7, (n, channels, 1, 1))
        pictures += 0.12 * np.sin(frequency[0] * rows + frequency[1] * columns + phase)
    return np.clip(pictures, 0, 1).astype(np.float32)


def perturbations(n: int, channels: int) -> Column:
    """(n, C, H, W), ±EPS in patches, as linf attacks leave them."""
    draw = np.random.default_rng(2)
    signs = draw.choice([-1.0, 1.0], (n, channels, 16, 16)).repeat(2, axis=2).repeat(2, axis=3)
    return EPS * signs

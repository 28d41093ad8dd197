"""Runs as training and measuring leave them, made through the real stores, with numbers known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bastion.measuring.facts import Facts, write_measurement
from bastion.measuring.measurement import MeasuredAggregate, MeasuredCase, MeasuredThreat, Measurement
from bastion.measuring.order import measured_positions
from bastion.measuring.store import FactStore
from bastion.recipe import Recipe
from bastion.run import Run, create_run, environment

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
EPS = 8 / 255
N, BLOCK = 200, 100
KEEP = 16  # pictures, of the first examples
SPECS: dict[str, dict[str, Any]] = {
    "clean": {"name": "accuracy"},
    "attack": {"name": "adversarial", "attack": {"name": "pgd", "rel_step": 0.1}},
    "check": {"name": "sanity"},
}

Column = np.ndarray[Any, Any]
MakeRun = Callable[..., Run]  # the fixture `make_run`


def train_run(folder: Path, *, robust: float, epochs: int = 12, about: str = "") -> Run:
    """A run with a recipe and a log; without robust numbers if `robust` is zero, as in standard training."""
    recipe = Recipe.model_validate(
        {
            "about": about,
            "data": "cifar10-mini",
            "model": "vit/micro",
            "objective": "trades" if robust else "standard",
            "seed": 3,
        }
    )
    run = create_run(folder, seed=3, recipe=recipe)
    noise = np.random.default_rng(round(1000 * robust))
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
    norm: str | None = "linf",
    identity: str = "",
    version: str = "",
    about: Mapping[str, Any] | None = None,
    symptoms: Mapping[str, float] | None = None,
) -> None:
    """Facts of an accuracy probe and of an attack with exactly these accuracies, spread over the examples.

    With `symptoms`, the shares of the examples that show them, also of sanity checks.
    """
    draw = np.random.default_rng(7)
    truth, other = draw.integers(0, len(classes), n), draw.integers(1, len(classes), n)
    mistaken = (truth + other) % len(classes)
    spread = np.argsort(draw.random(n))
    alive, survived = spread < round(clean * n), spread < round(robust * n)
    fooled = alive & ~survived
    clean_pictures = smooth_pictures(channels) if images is None else images[:KEEP]
    delta = np.where(alive[:KEEP, None, None, None], perturbations(channels), 0)[: len(clean_pictures)]
    pictures = {
        "clean": clean_pictures,
        "adversarial": np.clip(clean_pictures + delta, 0, 1).astype(np.float32),
        "position": np.arange(len(clean_pictures)),
    }
    common = {"index": np.arange(n), "label": truth}
    facts = {
        "clean": {**common, "correct": alive, "prediction": np.where(alive, truth, mistaken)},
        label: {
            **common,
            "correct": survived,
            "prediction": np.where(survived, truth, mistaken),
            "before": np.where(alive, truth, mistaken),
            "in_budget": np.ones(n, dtype=bool),
            "distance": np.where(fooled, EPS, np.nan).astype(np.float32),
        },
    }
    if symptoms is not None:
        facts["sanity"] = common | {
            f"warning.{code}": np.arange(n) < round(share * n) for code, share in symptoms.items()
        }
    cases = []
    for name, columns in facts.items():
        store = FactStore(run.facts / f"identity{identity}" / f"{list(facts).index(name)}{version}")
        for start in range(0, n, BLOCK):
            rows = range(start, min(start + BLOCK, n))
            part = {key: column[rows.start : rows.stop] for key, column in columns.items()}
            store.write(
                rows, part, pictures if name == label and start == 0 and len(clean_pictures) else {}, {"device": "cpu"}
            )
        store.merge()
        role = "clean" if name == "clean" else "attack" if name == label else "check"
        cases.append(
            MeasuredCase(
                label=name,
                kind="probes",
                role=role,
                store=store.name,
                n=n,
                spec=SPECS[role],
                threat=MeasuredThreat(norm=norm, eps=EPS) if role == "attack" and norm else None,
                columns=tuple(columns),
            )
        )
    about = {
        **environment(3),
        "model": run.name,
        "weights": "5eed",
        "data": {"name": "cifar10-mini", "fingerprint": "f00d", "split": "test"},
        "classes": classes,
        "suite": "demo",
        "n": n,
        "cases": tuple(cases),
        "aggregates": {"worst case": MeasuredAggregate(kind="worst", members={"clean": 1.0, label: 1.0})},
    } | dict(about or {})
    write_measurement(run, Measurement(**about))


def measure_cases(
    run: Run, cases: Mapping[str, Mapping[str, Any]], *, identity: str = "identity-of-cases", **about: Any
) -> Facts:
    """A measurement of these probes: by label, `columns` and whatever else a `MeasuredCase` says."""
    measured = []
    for number, (label, said) in enumerate(cases.items()):
        columns: dict[str, Column] = said["columns"]
        n = len(next(iter(columns.values())))
        positions = np.arange(n)
        if said.get("kind", "probes") == "probes":
            positions = measured_positions(n, about.get("population"))
            columns = {"index": positions, **columns}
        store = FactStore(run.facts / identity / f"{about.get('suite', 'made')}-{number}")
        store.write(positions.tolist(), columns, {}, {"device": "cpu"})
        named = {"label": label, "kind": "probes", "store": store.name, "n": n, "spec": {}, "columns": tuple(columns)}
        measured.append(MeasuredCase(**named | {key: value for key, value in said.items() if key != "columns"}))
    common: dict[str, Any] = {
        "model": run.name,
        "weights": "5eed",
        "data": {"name": "cifar10-mini", "fingerprint": "f00d", "split": "test"},
        "classes": CLASSES,
        "suite": "made",
        "n": max((case.n for case in measured if case.kind == "probes"), default=1),
    }
    return write_measurement(run, Measurement(cases=tuple(measured), **environment(3) | common | about))


def measure_everything(run: Run, n: int = 120, **about: Any) -> Facts:
    """Facts for every section that a measurement can have, of examples that fall one by one."""
    strength = np.random.default_rng(5).permutation(n) / n  # right as long as it is above a threshold
    truth = np.arange(n) % len(CLASSES)
    seen = np.where(strength > 0.2, truth, (truth + 1) % len(CLASSES))
    threats = {level: {"norm": "linf", "eps": level / 255} for level in (2, 4, 8)}
    passes = {"forwards": np.full(n, 40), "backwards": np.full(n, 20)}
    fooled_by = np.select([strength <= 0.2, strength <= 0.5, strength <= 0.55], [-1, 0, 1], -1)
    cases: dict[str, dict[str, Any]] = {
        "clean": {"role": "clean", "columns": {"correct": strength > 0.2, "prediction": seen, "label": truth}},
        "autoattack": {
            "role": "attack",
            "threat": threats[8],
            "members": ("apgd-ce", "apgd-t", "fab-t", "square"),
            "columns": {"correct": strength > 0.55, "fooled_by": fooled_by, **passes},
        },
        "distance": {
            "role": "attack",
            "spec": {"name": "distortion", "norm": "l2"},
            "columns": {"distance": np.maximum(strength - 0.2, 0).astype(np.float32)},
        },
        "cost": {
            "kind": "studies",
            "role": "analysis",
            "columns": {"parameters": np.array([696_234]), "macs": np.array([26_436_860])},
        },
    }
    for level, threat in threats.items():
        columns = {"correct": strength > 0.2 + level / 20}
        said = {"role": "attack", "threat": threat, "at": {"eps": threat["eps"]}, "columns": columns}
        cases[f"pgd eps={level}/255"] = said
    for kind, harm in {"fog": 0.05, "gaussian_noise": 0.12, "motion_blur": 0.1}.items():
        for severity in range(1, 6):
            cases[f"corrupted corruption={kind} severity={severity}"] = {
                "role": "corruption",
                "at": {"corruption": kind, "severity": severity},
                "columns": {"correct": strength > 0.2 + harm * severity},
            }
    for size in (24, 32, 48):
        columns = {"correct": strength > 0.2 + abs(size - 32) / 50}
        cases[f"resized size={size}"] = {"role": "clean", "at": {"size": size}, "columns": columns}
    worst = MeasuredAggregate(kind="worst", members={"clean": 1.0, "autoattack": 1.0})
    return measure_cases(run, cases, aggregates={"worst case": worst}, **about)


def smooth_pictures(channels: int, size: int = 32) -> Column:
    """(KEEP, C, H, W) in [0,1]: a few slow waves each."""
    draw = np.random.default_rng(1)
    rows, columns = np.meshgrid(np.linspace(0, 1, size), np.linspace(0, 1, size), indexing="ij")
    pictures = np.full((KEEP, channels, size, size), 0.5)
    for _ in range(4):
        frequency = draw.normal(0, 5, (2, KEEP, channels, 1, 1))
        phase = draw.uniform(0, 7, (KEEP, channels, 1, 1))
        pictures += 0.12 * np.sin(frequency[0] * rows + frequency[1] * columns + phase)
    return np.clip(pictures, 0, 1).astype(np.float32)


def perturbations(channels: int) -> Column:
    """(KEEP, C, H, W): ±EPS in patches, much as linf attacks leave them."""
    signs = np.random.default_rng(2).choice([-1.0, 1.0], (KEEP, channels, 16, 16))
    return EPS * signs.repeat(2, axis=2).repeat(2, axis=3)

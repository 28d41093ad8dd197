"""Measurements of many models as summaries alone, as `bastion measure` leaves them, without facts.

As a script: `python -m tests.many_models FOLDER 1000` makes runs of so many models on two data sets.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bastion import storage
from bastion.measuring.intervals import wilson
from bastion.measuring.measurement import MeasuredAggregate, MeasuredCase, MeasuredThreat, Measurement
from bastion.run import PROVENANCE, Run, environment

FAMILIES = {
    **dict.fromkeys(("resnet", "wide-resnet", "convnext"), "CNN"),
    **dict.fromkeys(("vit", "swin", "cait"), "Transformer"),
    "xcit": "hybrid",
}
DATA = {
    "cifar10": {"name": "cifar10", "split": "test", "fingerprint": "c1fa", "digest": "8193b3fb"},
    "imagenet": {"name": "imagenet", "split": "val", "fingerprint": "1mag", "digest": "77aa01cc"},
}
THREATS = {
    "autoattack linf": MeasuredThreat(norm="linf", eps=8 / 255),
    "autoattack l2": MeasuredThreat(norm="l2", eps=0.5),
}


def summarize(run: Run, clean: float, robust: dict[str, float], *, n: int = 1000, **about: Any) -> None:
    """A measurement file: accuracy on clean images, and under AutoAttack by the labels of `THREATS`."""
    cases = [_case("clean", "clean", {"name": "accuracy"})]
    for label in robust:
        threat = THREATS[label]
        spec = {"name": "adversarial", "threat": threat.model_dump(), "attack": "autoattack"}
        members = ("apgd-ce", "apgd-t", "fab-t", "square")
        cases.append(_case(label, "attack", spec, threat=threat, members=members))
    shares = {"clean": clean, **robust, "worst case": min([clean, *robust.values()])}
    said = {
        "model": run.name,
        "weights": storage.fingerprint(run.name, digits=16),
        "data": DATA["cifar10"],
        "classes": tuple(map(str, range(10))),
        "suite": "made",
        "n": n,
        "cases": tuple(cases),
        "aggregates": {"worst case": MeasuredAggregate(kind="worst", members=dict.fromkeys(["clean", *robust], 1.0))},
        "summary": {label: wilson(round(share * n), n) for label, share in shares.items()},
    }
    measurement = Measurement(**_environment() | said | about)
    name = storage.fingerprint([measurement.model, measurement.data, measurement.n, measurement.created], digits=8)
    _write(run.measurements / f"made-{name}.json", measurement.model_dump(mode="json"))


def make_run(folder: Path) -> Run:
    _write(folder / PROVENANCE, {"id": "made"})
    return Run(folder)


@functools.cache
def _environment() -> dict[str, Any]:
    return environment(0)


def _write(path: Path, content: dict[str, Any]) -> None:
    """Not through `storage`, which waits for the disk: a thousand times that is a minute."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def _case(label: str, role: str, spec: dict[str, Any], **more: Any) -> MeasuredCase:
    store = f"identity/{storage.fingerprint({'probes': spec, 'seed': 0}, digits=16)}"
    said = {"label": label, "kind": "probes", "role": role, "store": store, "n": 1, "spec": spec}
    return MeasuredCase(**said, columns=("correct",), **more)


def make_many(folder: Path, count: int) -> None:
    """Runs with accuracies and sizes as published models have them."""
    draw = np.random.default_rng(0)
    for number in range(count):
        family = list(FAMILIES)[number % len(FAMILIES)]
        run = make_run(folder / f"{family}-{number:04d}")
        clean = float(draw.uniform(0.45, 0.95))
        linf = clean * float(draw.uniform(0.3, 0.75))
        robust = {"autoattack linf": linf} | ({"autoattack l2": linf + 0.1 * (clean - linf)} if number % 3 else {})
        data = DATA["imagenet" if number % 5 == 4 else "cifar10"]
        doubts = ("zero-gradient",) if number % 50 == 7 else ()
        parameters = round(10 ** float(draw.uniform(5.5, 8.5)))
        n = 1000 if number % 10 else 256
        said = {"data": data, "doubts": doubts, "parameters": parameters, "category": FAMILIES[family]}
        summarize(run, clean, robust, n=n, **said)


if __name__ == "__main__":
    make_many(Path(sys.argv[1]), int(sys.argv[2]))

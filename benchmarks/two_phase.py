"""Two-phase AutoAttack beside bastion's own `standard` and the reference's, on CIFAR-10 at linf 8/255.

    python -m benchmarks.two_phase --model zoo/cifar10-linf-vit --n 2000        # measure what is not stored, print
    python -m benchmarks.two_phase --model zoo/cifar10-linf-vit --stored

Whole runs by the clock, on all cores: two phases, then `standard`, then the reference on the first images, whose time
per image counts. The facts of `standard` say of every survivor of the first phase what the second would have done, so
the sample is also drawn anew many times: how often does the interval hold what `standard` found, and how wide is it?
Times for 10,000 images are made of the times per image of both phases.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bastion import storage
from bastion.data import datasets
from bastion.measuring.facts import Facts
from bastion.measuring.runner import measure
from bastion.measuring.sampling import sample_size, two_phase
from bastion.threat import Threat
from benchmarks.autoattack import STANDARD, by_reference, load_model, without_checks

RESULTS = Path(__file__).parent / "results" / "two_phase"
THREAT = Threat("linf", 8 / 255)
FIRST = 2  # members of the first phase
DRAWS = 2000
WIDTH = 0.005


def timed(model: str, probe: dict[str, Any], n: int) -> tuple[Facts, float]:
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        facts = measure(model, "cifar10", {"probes": {"attack": probe}}, limit=n, workers=None, folder=folder)
        seconds = time.perf_counter() - began
        for name in facts.columns:  # before the folder goes
            facts.columns[name]
    return facts, seconds


def run(model: str, n: int, share: float, images: int, stored: dict[str, Any], path: Path) -> None:
    """Each of the three parts once, stored as soon as it is done."""
    threat = asdict(THREAT)
    if "two-phase" not in stored:
        facts, seconds = timed(model, {"name": "two-phase", "threat": threat, "share": share}, n)
        columns = {name: facts.columns[f"attack/{name}"].tolist() for name in ("survived", "sampled", "lost")}
        stored["two-phase"] = {"seconds": seconds, "share": share, **columns}
        storage.write_json(path, stored)
    if "first phase" not in stored:
        ensemble = {"name": "ensemble", "members": ["apgd-ce", {"name": "apgd-t"}]}
        _, seconds = timed(model, {"name": "adversarial", "threat": threat, "attack": ensemble}, n)
        stored["first phase"] = {"seconds": seconds}
        storage.write_json(path, stored)
    if STANDARD not in stored:
        facts, seconds = timed(model, {"name": "adversarial", "threat": threat, "attack": "autoattack"}, n)
        columns = {name: facts.columns[f"attack/{name}"].tolist() for name in ("correct", "fooled_by")}
        stored[STANDARD] = {"seconds": seconds, **columns}
        storage.write_json(path, stored)
    if "reference" not in stored:
        without_checks()
        torch.set_num_threads(os.cpu_count() or 1)
        batch = datasets.build("cifar10").test.batch(range(images))
        stored["reference"] = {"seconds": by_reference(load_model(model), batch, THREAT, STANDARD).seconds, "n": images}
        storage.write_json(path, stored)


def coverage(survived: np.ndarray[Any, Any], lost: np.ndarray[Any, Any], share: float) -> tuple[float, float]:
    """Over many draws of the sample: how often the interval holds the truth, and its mean width."""
    truth, generator = (survived & ~lost).mean(), np.random.default_rng(0)
    held, widths = 0, []
    for _ in range(DRAWS):
        sampled = survived & (generator.random(len(survived)) < share)
        estimate = two_phase(survived, sampled, lost & sampled)
        held += bool(estimate.low <= truth <= estimate.high)
        widths.append(estimate.high - estimate.low)
    return held / DRAWS, float(np.mean(widths))


def report(n: int, stored: dict[str, Any]) -> list[str]:
    whole, phases, first = stored[STANDARD], stored["two-phase"], stored["first phase"]["seconds"]
    survived, sampled, lost = (np.array(phases[name]) for name in ("survived", "sampled", "lost"))
    estimate, correct = two_phase(survived, sampled, lost), np.array(whole["correct"])
    fell = survived & ~correct  # what the second phase would have taken
    held, width = coverage(survived, fell, phases["share"])
    reference = stored["reference"]["seconds"] / stored["reference"]["n"]
    later = (whole["seconds"] - first) / survived.sum()  # seconds of the second phase for a survivor
    survivors = round(10_000 * survived.mean())
    drawn = sample_size(survivors, 10_000, width=WIDTH, lost_share=fell.sum() / survived.sum())
    large = 10_000 * first / n + drawn * later
    return [
        f"standard: {100 * correct.mean():.2f} %; two-phase: {100 * estimate.value:.2f} % "
        f"[{100 * estimate.low:.2f}, {100 * estimate.high:.2f}], {sampled.sum()} of {survived.sum()} survivors "
        f"sampled, {lost.sum()} lost ({fell.sum()} of all survivors are)",
        f"over {DRAWS} draws: the interval holds standard's number in {100 * held:.1f} %, mean width "
        f"{100 * width:.2f} points",
        f"{n} images: {phases['seconds']:.0f} s, standard {whole['seconds']:.0f} s "
        f"({whole['seconds'] / phases['seconds']:.2f}x), reference {n * reference:.0f} s "
        f"({n * reference / phases['seconds']:.2f}x; timed on {stored['reference']['n']})",
        f"10,000 images, {drawn} of {survivors} survivors sampled for {100 * WIDTH:g} points: standard "
        f"{10_000 * whole['seconds'] / n / large:.2f}x, reference {10_000 * reference / large:.2f}x as long",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo/cifar10-linf-vit")
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--reference", type=int, default=256, help="images for the reference")
    parser.add_argument("--stored", action="store_true", help="measure nothing, print what is stored")
    options = parser.parse_args()
    path = RESULTS / f"{options.model.rpartition('/')[2]}-{options.n}.json"
    stored = storage.read_json(path) if path.is_file() else {}
    if not options.stored:
        run(options.model, options.n, options.share, options.reference, stored, path)
    print("\n".join(report(options.n, stored)))


if __name__ == "__main__":
    main()

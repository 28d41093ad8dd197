"""Two-phase AutoAttack beside bastion's own `standard` and the reference's, on CIFAR-10 at linf 8/255.

    python -m benchmarks.two_phase --model zoo/cifar10-linf-vit --n 2000        # measure what is not stored, print
    python -m benchmarks.two_phase --model zoo/cifar10-linf-vit --n 2000 --stored

Four ways to attack the same images: in two phases with the share of survivors that 2,000 images need, in two phases
with the share that 10,000 need, `standard`, and the reference. Each attacks one block after another on one thread, and
counts the processor's seconds of the process and its children, so that other programs on the machine matter little.
Blocks are the batches that bastion itself makes. One block is one file: a run that is stopped goes on where it was.

The reference attacks the first block alone, whose images take longer than the others. So it is compared with `standard`
on that block, and `standard` with two phases on all images: the two ratios are multiplied.

The facts of `standard` say of every survivor of the first phase what the second would have done, so the sample is also
drawn anew many times: how often does the interval hold what `standard` found, and how wide is it?
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bastion import storage
from bastion.data import datasets
from bastion.measuring.plan import BATCH_SIZE
from bastion.measuring.runner import measure
from bastion.measuring.sampling import sample_size, two_phase
from bastion.threat import Threat
from benchmarks.autoattack import STANDARD, by_reference, load_model, without_checks

RESULTS = Path(__file__).parent / "results" / "two_phase"
THREAT = Threat("linf", 8 / 255)
SHARES = {"two-phase": 0.27, "two-phase-10000": 0.06}
REFERENCE = "reference"
BLOCKS = {"two-phase": 4 * BATCH_SIZE, "two-phase-10000": 17 * BATCH_SIZE, STANDARD: BATCH_SIZE, REFERENCE: BATCH_SIZE}
ONE_BLOCK = ("two-phase-10000", REFERENCE)
DRAWS = 2000
WIDTH = 0.005

Columns = dict[str, np.ndarray[Any, Any]]


class Job(NamedTuple):
    """One way to attack one block of images."""

    model: str
    way: str
    start: int  # of the block
    stop: int

    @property
    def path(self) -> Path:
        return RESULTS / self.model.rpartition("/")[2] / f"{self.way}-{self.start:05d}.json"


def jobs(model: str, n: int) -> list[Job]:
    """In turn, so that what disturbs the machine for a while disturbs all ways alike."""
    listed = [
        Job(model, way, start, min(start + size, n))
        for way, size in BLOCKS.items()
        for start in range(0, n if way not in ONE_BLOCK else 1, size)
    ]
    return sorted(listed, key=lambda job: job.stop)


def processor_seconds() -> float:
    """Of this process, all its threads, and the children that it has waited for."""
    return sum(os.times()[:4])


def run(job: Job) -> None:
    torch.set_num_threads(1)
    data = datasets.build("cifar10")
    block = data.test.subset(range(job.start, job.stop))
    if job.way == REFERENCE:
        without_checks()
        model, batch = load_model(job.model), block.batch(range(len(block)))
        began = processor_seconds()
        found = {"correct": by_reference(model, batch, THREAT, STANDARD).robust}
    else:
        probe = {"name": "adversarial", "threat": asdict(THREAT), "attack": "autoattack"}
        if share := SHARES.get(job.way):
            probe = {"name": "two-phase", "threat": asdict(THREAT), "share": share}
        wanted = ("survived", "sampled", "lost") if share else ("correct", "fooled_by")
        began = processor_seconds()
        with tempfile.TemporaryDirectory() as folder:
            facts = measure(job.model, replace(data, test=block), {"probes": {"attack": probe}}, folder=folder)
            found = {name: facts.columns[f"attack/{name}"].tolist() for name in wanted}
    storage.write_json(job.path, {"seconds": processor_seconds() - began, **found})
    print(job.path.relative_to(RESULTS), flush=True)


def read(listed: Sequence[Job]) -> tuple[Columns, float]:
    """The columns of these blocks, one after another, and seconds per image."""
    stored = [storage.read_json(job.path) for job in listed]
    seconds = sum(each.pop("seconds") for each in stored) / sum(job.stop - job.start for job in listed)
    return {name: np.concatenate([each[name] for each in stored]) for name in stored[0]}, seconds


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


def report(model: str, n: int) -> list[str]:
    listed = jobs(model, n)
    ways = {way: read([job for job in listed if job.way == way]) for way in (*SHARES, STANDARD)}
    (reference,) = (job for job in listed if job.way == REFERENCE)
    shared = [read([job])[1] for job in (reference, reference._replace(way=STANDARD))]  # both on its block
    seconds = {way: each for way, (_, each) in ways.items()}
    survived, sampled, lost = (ways["two-phase"][0][name] for name in ("survived", "sampled", "lost"))
    estimate, correct = two_phase(survived, sampled, lost), ways[STANDARD][0]["correct"]
    fell = survived & ~correct  # what the second phase would have taken
    held, width = coverage(survived, fell, SHARES["two-phase"])
    survivors = round(10_000 * survived.mean())
    needed = sample_size(survivors, 10_000, width=WIDTH, lost_share=fell.sum() / survived.sum())

    def ratios(way: str) -> str:
        ratio = seconds[STANDARD] / seconds[way]
        return (
            f"{seconds[way]:.3f} s per image; standard {ratio:.2f}x as long, "
            f"reference {ratio * shared[0] / shared[1]:.2f}x as long"
        )

    return [
        f"standard: {seconds[STANDARD]:.3f} s per image; on the first {reference.stop} images {shared[1]:.3f} s, the "
        f"reference there {shared[0]:.3f} s",
        f"standard: {100 * correct.mean():.2f} %; two-phase: {100 * estimate.value:.2f} % "
        f"[{100 * estimate.low:.2f}, {100 * estimate.high:.2f}], {sampled.sum()} of {survived.sum()} survivors "
        f"sampled, {lost.sum()} lost ({fell.sum()} of all survivors are)",
        f"over {DRAWS} draws: the interval holds standard's number in {100 * held:.1f} %, mean width "
        f"{100 * width:.2f} points",
        f"share {SHARES['two-phase']}, for {n} images: {ratios('two-phase')}",
        f"share {SHARES['two-phase-10000']}, for 10,000 images: {ratios('two-phase-10000')}; "
        f"{100 * WIDTH:g} points need {needed} of {survivors} survivors, a share of {needed / survivors:.3f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo/cifar10-linf-vit")
    parser.add_argument("--n", type=int, default=2000, help="images")
    parser.add_argument("--jobs", type=int, help="stop after so many blocks, on a machine that is shared")
    parser.add_argument("--stored", action="store_true", help="measure nothing, print what is stored")
    options = parser.parse_args()
    missing = [job for job in jobs(options.model, options.n) if not job.path.is_file()]
    for job in [] if options.stored else missing[: options.jobs]:
        run(job)
    if all(job.path.is_file() for job in missing):
        print("\n".join(report(options.model, options.n)))


if __name__ == "__main__":
    main()

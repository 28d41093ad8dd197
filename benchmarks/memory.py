"""Memory of measuring and training against the number of images, and how long pages about many runs take.

    python -m benchmarks.memory --write

Images are made when they are asked for, so what grows is bastion's own. Each size is a process of its own that works on
the first few batches; what counts is the most memory that it ever held.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tests.many_models import make_many

from bastion import measure, train
from bastion.data import datasets
from bastion.models import checkpoint
from bastion.reporting.html import report
from bastion.reporting.leaderboard import leaderboard
from bastion.types import Batch, DataSet

RESULTS = Path(__file__).parent / "results" / "memory.md"
PLOT = Path(__file__).parents[1] / "docs" / "memory.png"
SIZES = (1_000, 10_000, 100_000, 1_000_000)
WAYS = ("measure", "train")
MODEL = {"name": "vit/micro", "num_classes": 10, "stem": [8, 16], "embed_dim": 16, "depth": 1, "num_heads": 2}


class MadeSplit:
    """Images that are a function of their number."""

    def __init__(self, index: torch.Tensor) -> None:
        self.index, self.labels = index, index % 10

    def __len__(self) -> int:
        return len(self.index)

    def image(self, position: int) -> Image.Image:
        draw = np.random.default_rng(int(self.index[position]))
        return Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8))

    def batch(self, positions: Sequence[int]) -> Batch:
        where = torch.as_tensor(positions, dtype=torch.long)
        pictures = np.stack([np.asarray(self.image(position)) for position in where.tolist()])
        return Batch(self.index[where], torch.from_numpy(pictures).permute(0, 3, 1, 2) / 255, self.labels[where])

    def digest(self) -> str:
        return f"made {len(self)}"

    def subset(self, positions: Sequence[int]) -> MadeSplit:
        return MadeSplit(self.index[torch.as_tensor(positions, dtype=torch.long)])


@datasets.register("made")
def made(n: int) -> DataSet:
    """n images for training, n for testing and 100 for validation."""
    every = MadeSplit(torch.arange(n))
    names = tuple(str(label) for label in range(10))
    stats = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
    return DataSet(
        "made",
        names,
        (3, 32, 32),
        **stats,
        train=every,
        val=every.subset(range(100)),
        test=every,
        fingerprint=f"made-{n}",
    )


def work(way: str, n: int, folder: Path) -> None:
    """A few batches of so many images."""
    if way == "measure":
        model = checkpoint.build(MODEL, mean=(0.5,) * 3, std=(0.25,) * 3)
        measure(model, made(n), "demo", until=0.5, folder=folder, batch_size=64)
    else:
        changes = (f"data={{name: made, n: {n}}}", f"model={MODEL}".replace("'", ""), "schedule.epochs=1", "batch=100")
        stopped = _StopAfter(10)
        try:
            train("base/micro", changes=(*changes, "validate.limit=100"), folder=folder)
        except KeyboardInterrupt:
            assert stopped.steps == 10


class _StopAfter:
    """Interrupts a training after so many steps."""

    def __init__(self, most: int) -> None:
        from bastion.training.trainer import Trainer

        self.steps, plain = 0, Trainer.train_step

        def counted(trainer: Trainer, batch: Batch) -> object:
            if self.steps == most:
                raise KeyboardInterrupt
            self.steps += 1
            return plain(trainer, batch)

        Trainer.train_step = counted  # type: ignore[assignment,method-assign]


def peak(way: str, n: int) -> float:
    """MB that a process held at most."""
    words = [sys.executable, "-m", "benchmarks.memory", "--work", way, str(n)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    megabytes = float(done.stdout.split()[-1])
    print(f"{way}, {n:,} images: {megabytes:.0f} MB", flush=True)
    return megabytes


def pages(folder: Path) -> list[tuple[str, float, float]]:
    """Seconds of the processor and MB of a report of 200 runs and a leaderboard of 1,000 models."""
    model = checkpoint.build(MODEL, mean=(0.5,) * 3, std=(0.25,) * 3)
    measure(model, made(1000), "demo", limit=64, folder=folder / "measured")
    runs = [folder / "reported" / f"run-{number:03d}" for number in range(200)]
    for run in runs:
        shutil.copytree(folder / "measured", run)
    make_many(folder / "many", 1000)
    found = []
    for name, write in (
        ("leaderboard of 1,000 models", lambda page: leaderboard(folder / "many", page)),
        ("report of 200 runs", lambda page: report(runs, page)),
    ):
        began, page = time.process_time(), folder / "page.html"
        write(page)
        found.append((name, time.process_time() - began, page.stat().st_size / 1e6))
    return found


def plot(peaks: dict[str, list[float]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for way, values in peaks.items():
        axes.plot(SIZES, values, "o-", label=f"bastion {way}")
    axes.set(xscale="log", xlabel="images in the data set", ylabel="peak memory (MB)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(PLOT, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs=2, metavar=("WAY", "N"), help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="also write results and plot")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="memory-"))
    try:
        if given.work:
            work(given.work[0], int(given.work[1]), folder / "run")
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
            return
        peaks = {way: [peak(way, n) for n in SIZES] for way in WAYS}
        rows = [f"| {n:,} | {peaks['measure'][row]:.0f} | {peaks['train'][row]:.0f} |" for row, n in enumerate(SIZES)]
        lines = ["| images | `measure`, MB | `train`, MB |", "| ---: | ---: | ---: |", *rows, ""]
        lines += ["| page | seconds of the processor | MB |", "| --- | ---: | ---: |"]
        lines += [f"| {name} | {seconds:.1f} | {size:.1f} |" for name, seconds, size in pages(folder)]
        print("\n".join(lines))
        if given.write:
            RESULTS.write_text("\n".join([f"# {__doc__.splitlines()[0]}", "", *lines, ""]))
            plot(peaks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

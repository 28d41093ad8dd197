"""How close adversarial training comes to the machine's limit, and how it compares with a plain loop.

    python -m benchmarks.training                    # four ways of training, a ViT and a ResNet, on one thread
    python -m benchmarks.training --models vit --rounds 5
    python -m benchmarks.training --threads 2        # on two threads
    python -m benchmarks.training --processes 2      # two processes of one thread beside one process of two

The limit is what the passes alone would take, measured on the same model, batch and machine in the same run: input
gradients with frozen parameters (g), forward passes (f), and forward and backward passes with gradients of all
parameters (t). Training is `bastion train` as a user runs it, with data loading, augmentation, optimizer and log.
The plain loop is the same step written with torchattacks, if it is installed, on batches from the same loader. Rounds
take turns, so that all see the same noise; medians count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bastion.attacks.losses import ce
from bastion.data import datasets
from bastion.data.augment import TrainingTransform
from bastion.data.loader import training_batches
from bastion.data.pool import Pool
from bastion.forward import frozen, in_mode, input_gradient
from bastion.recipe import Recipe, load_recipe
from bastion.run import Run
from bastion.training.build import build_model
from bastion.training.optim import make_optimizer
from bastion.training.trainer import train
from bastion.types import Batch

BATCH = 128
MODELS = {
    "vit": ("model={name: vit/micro}", "optimizer.clip_grad=1", "accumulate=2"),
    "resnet": (
        "model={name: resnet/micro, stem_stride: 2}",
        "optimizer={name: sgd, lr: 0.1, weight_decay: 5e-4, betas: [0.9, 0.999], clip_grad: null}",
        "channels_last=true",
    ),
}
THREAT = "threat: {norm: linf, eps: 8/255}"
# objective; the passes it needs
WAYS: dict[str, tuple[str, str]] = {
    "fgsm-rs": (f"{{name: adversarial, {THREAT}, attack: {{name: fgsm-rs, keep: last}}}}", "g+t"),
    "pgd-2": (f"{{name: adversarial, {THREAT}, attack: {{name: pgd, steps: 2, keep: last}}}}", "2g+t"),
    "apgd-2": (f"{{name: adversarial, {THREAT}, attack: {{name: apgd-train, steps: 2}}}}", "2g+f+t"),
    "trades-10": (f"{{name: trades, {THREAT}, attack: {{name: pgd, steps: 10, loss: kl, keep: last}}}}", "10g+f+2t"),
}


def changes_of(model: str, way: str, steps: int) -> tuple[str, ...]:
    return (
        *MODELS[model],
        f"objective={WAYS[way][0]}",
        f"batch={BATCH}",
        f"train_limit={BATCH * steps}",
        "schedule={epochs: 2, warmup_epochs: 0}",
        "validate={every: 2, limit: 1}",
        "log_every=10",
    )


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def passes(model: nn.Module, batch: Batch) -> dict[str, float]:
    """Seconds of one pass of each kind."""

    def forward() -> None:
        with torch.no_grad(), in_mode(model, training=False):
            model(batch.x)

    def gradient() -> None:
        x = batch.x.clone().requires_grad_()
        with frozen(model), in_mode(model, training=False):
            input_gradient(ce(model(x), batch.y), x)

    def training() -> None:
        model.train()
        F.cross_entropy(model(batch.x), batch.y).backward()
        model.zero_grad(set_to_none=True)

    return {"f": seconds(forward), "g": seconds(gradient), "t": seconds(training)}


def trained(model: str, way: str, steps: int, processes: int) -> float:
    """Seconds a step of `bastion train`; the first epoch warms up."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "run")
        if processes == 1:
            train("base/micro", changes=changes_of(model, way, steps), folder=run.folder)
        else:
            torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "-m", "bastion"]
            changes = [word for change in changes_of(model, way, steps) for word in ("--set", change)]
            command = [*torchrun, "train", "base/micro", *changes, "--dir", str(run.folder)]
            subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
        records = [record for record in run.history() if record["kind"] == "step"]
    return BATCH / float(records[-1]["images_per_s"])


def plain(model: nn.Module, batches: Iterator[Batch], recipe: Recipe, way: str) -> float:
    """Seconds a step of a loop as people write it; NaN without torchattacks."""
    try:
        import torchattacks as ta
    except ImportError:
        return float("nan")
    eps = 8 / 255
    attack = {
        "fgsm-rs": lambda: ta.FFGSM(model, eps=eps, alpha=1.25 * eps),
        "pgd-2": lambda: ta.PGD(model, eps=eps, alpha=1.25 * eps, steps=2),
        "apgd-2": lambda: ta.APGD(model, eps=eps, steps=2),
        "trades-10": lambda: ta.TPGD(model, eps=eps, alpha=0.25 * eps, steps=10),
    }[way]()
    optimizer = make_optimizer(model, recipe.optimizer)

    def step(x: Tensor, y: Tensor) -> None:
        worse = attack(x, y)
        if way == "trades-10":
            clean = model(x)
            apart = F.kl_div(model(worse).log_softmax(1), clean.softmax(1), reduction="batchmean")
            loss = F.cross_entropy(clean, y) + 6 * apart
        else:
            loss = F.cross_entropy(model(worse), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    times = []
    for _ in range(4):
        began = time.perf_counter()
        batch = next(batches)
        loading = time.perf_counter() - began
        with torch.no_grad(), in_mode(model, training=False):
            y = model(batch.x).argmax(1)  # its APGD leaves out what is classified wrong, of a new model nearly all
        model.train()
        times.append(loading + seconds(partial(step, batch.x, y)))
    return statistics.mean(times[1:])


def needed(formula: str, cost: dict[str, float]) -> float:
    """`2g+f+t` in seconds."""
    return sum(int(term[:-1] or 1) * cost[term[-1]] for term in formula.split("+"))


def compare(name: str, way: str, *, steps: int, rounds: int, processes: int, threads: int) -> None:
    recipe = load_recipe("base/micro", changes_of(name, way, steps))
    data = datasets.build("cifar10-mini")
    loader = training_batches(
        Pool(data.train), TrainingTransform(recipe.augment, data), batch=BATCH, seed=0, start=0, stop=100 * rounds
    )
    batches = iter(loader)
    batch = data.train.batch(range(BATCH))
    ours, theirs = build_model(recipe, data), build_model(recipe, data)
    if recipe.channels_last:
        ours.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    limits, mine, loops = [], [], []
    torch.set_num_threads(max(threads, processes))
    for _ in range(rounds):
        passes(ours, batch)
        rows = [passes(ours, batch) for _ in range(5)]
        limits.append(needed(WAYS[way][1], {kind: statistics.median(row[kind] for row in rows) for kind in rows[0]}))
        loops.append(plain(theirs, batches, recipe, way))
        mine.append(trained(name, way, steps, processes))
    limit, own = (statistics.median(times) for times in (limits, mine))
    share = statistics.median(a / b for a, b in zip(limits, mine, strict=True))
    ratio = statistics.median(a / b for a, b in zip(loops, mine, strict=True))
    rates = " | ".join(f"{BATCH / value:.0f}" for value in (own, limit))
    print(f"| {name} | {way} | {WAYS[way][1]} | {rates} | {share:.2f} | {ratio:.2f}× |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of an epoch, at whose end the log is written")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1, help="of one thread, beside as many threads")
    chosen = parser.parse_args()
    print("| model | training | passes | images/s | limit | of the limit | beside torchattacks |")
    print("|---|---|---|---|---|---|---|")
    for name in chosen.models:
        for way in chosen.ways:
            compare(
                name,
                way,
                steps=chosen.steps,
                rounds=chosen.rounds,
                processes=chosen.processes,
                threads=chosen.threads,
            )


if __name__ == "__main__":
    main()

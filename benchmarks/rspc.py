"""What a training step of RSPC costs beside standard training and TRADES, and picking patches beside an attack step.

    python -m benchmarks.rspc                 # three models, about ten minutes
    python -m benchmarks.rspc --models tiny/vit --write

Times are of the processor, on one thread, per image: everything from a loaded batch to the weights after the step. The
ways of training take turns, step by step, so that other work on the machine meets all of them; medians count. One
attack step is what a step more of PGD takes on the same model in eval mode, with frozen parameters.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bastion import rng
from bastion.acceleration import for_training
from bastion.attacks import Threat
from bastion.attacks.pgd import PGD
from bastion.data.known import outline
from bastion.forward import in_mode
from bastion.memory import keep_freed_memory
from bastion.models import checkpoint
from bastion.models.corruption_model import CorruptionModel, keep_mask
from bastion.recipe import load_recipe
from bastion.training.build import set_up_objective
from bastion.training.loss import StepLoss
from bastion.training.objectives import objectives
from bastion.training.optim import make_optimizer
from bastion.types import Batch, DataSet, TrainingContext

RESULTS = Path(__file__).parent / "results" / "rspc.md"
PAGE = Path(__file__).parents[1] / "docs" / "training.md"
# model: whose images it takes, and how many at once
MODELS = {
    "tiny/vit": ("cifar10", 128),
    "tiny/rvt": ("cifar10", 32),
    "timm/deit_tiny_patch16_224": ("imagenet", 8),
}
THREAT = Threat("linf", 1 / 255)
GOAL = 2.2


def trades(steps: int) -> dict[str, Any]:
    """As in the recipes of Fig. 7."""
    attack = {"name": "pgd", "steps": steps, "rel_step": 1.5 / steps, "loss": "kl", "keep": "last"}
    return {"name": "trades", "threat": THREAT, "attack": attack}


WAYS: dict[str, dict[str, Any]] = {
    "standard": {"name": "standard"},
    "RSPC": {"name": "rspc"},
    "RSPC, random patches": {"name": "rspc", "patches": "random"},
    "TRADES, 1 step": trades(1),
    "TRADES, 2 steps": trades(2),
    "TRADES, 3 steps": trades(3),
}


def seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


class Training:
    """A model, an objective and their optimizers."""

    def __init__(self, name: str, data: DataSet, objective: dict[str, Any]) -> None:
        recipe = load_recipe("base/micro")
        self.model = checkpoint.build({"name": name}, mean=data.mean, std=data.std)
        self.objective = objectives.build(objective)
        set_up_objective(self.objective, TrainingContext(self.model, data, recipe))
        self.loss = StepLoss(self.model, self.objective, 0.0)
        self.optimizer = make_optimizer(self.model, recipe.optimizer)
        self.done = 0

    def step(self, batch: Batch) -> None:
        self.loss.train()
        prepared = self.objective.prepare(self.model, batch, progress=1.0, seed=self.done)
        self.loss(prepared).total.backward()
        for optimizer in filter(None, (self.optimizer, self.objective.optimizer)):
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, 5.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.done += 1


def batch_of(data: DataSet, count: int) -> Batch:
    index = torch.arange(count)
    return Batch(index, rng.uniform(0, index, "images", data.shape), index % len(data.classes))


def training_times(name: str, data: DataSet, batch: Batch, rounds: int) -> dict[str, float]:
    """Seconds an image by the way of training."""
    arms = {way: Training(name, data, objective) for way, objective in WAYS.items()}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds + 1):
        for way, arm in arms.items():
            spent = seconds(lambda arm=arm: arm.step(batch)) / len(batch.x)
            if turn:  # the first warms up
                times[way].append(spent)
    return {way: statistics.median(each) for way, each in times.items()}


def example_times(name: str, data: DataSet, batch: Batch, rounds: int) -> dict[str, float]:
    """Seconds an image to find the input to train on."""
    model = checkpoint.build({"name": name}, mean=data.mean, std=data.std)
    objective = objectives.build({"name": "rspc"})
    set_up_objective(objective, TrainingContext(model, data, load_recipe("base/micro")))
    network = objective.networks
    assert isinstance(network, CorruptionModel)
    grid = network.grid

    def attack(steps: int) -> None:
        with in_mode(model, training=False), for_training(model) as attacked:
            PGD(steps=steps, rel_step=0.5, keep="last")(attacked, batch, THREAT, seed=0)

    def mask() -> None:
        keep_mask(network(batch.x), grid, grid.share(0.1))

    def occlude() -> None:
        noise = objective.prepare(model, batch, progress=0.0, seed=0).x
        keep = keep_mask(network(batch.x), grid, grid.share(0.1))
        torch.cat([batch.x, keep * batch.x + (1 - keep) * noise])

    times: dict[str, list[float]] = {"attack step": [], "C(x) and mask": [], "C(x), mask, noise and occlusion": []}
    for turn in range(rounds + 1):
        steps = (seconds(lambda: attack(3)) - seconds(lambda: attack(1))) / 2
        found = (steps, *(seconds(lambda each=each: [each() for _ in range(10)]) / 10 for each in (mask, occlude)))  # type: ignore[misc]
        if turn:
            for kept, spent in zip(times.values(), found, strict=True):
                kept.append(spent / len(batch.x))
    return {what: statistics.median(each) for what, each in times.items()}


def table(name: str, rounds: int) -> list[str]:
    where, count = MODELS[name]
    data = outline({"name": where})
    batch = batch_of(data, count)
    times = training_times(name, data, batch, rounds)
    usual = times["standard"]
    size = "×".join(map(str, data.shape[1:]))
    lines = [
        f"## {name}, {size}, batches of {count}",
        "",
        "| training step | ms an image | of standard |",
        "|---|---|---|",
    ]
    lines += [f"| {way} | {1e3 * spent:.3g} | {spent / usual:.2f}× |" for way, spent in times.items()]
    examples = example_times(name, data, batch, rounds)
    step = examples["attack step"]
    lines += ["", "| finding the input | ms an image | attack step : this |", "|---|---|---|"]
    lines += [f"| {what} | {1e3 * spent:.3g} | {step / spent:.1f} |" for what, spent in examples.items()]
    met = times["RSPC"] / usual <= GOAL
    return [*lines, "", f"RSPC at most {GOAL} times standard training: {'met' if met else 'not met'}.", ""]


def write_page(results: str) -> None:
    """Put the training steps of all models into one table of the page, as they are in the results."""
    models = results.split("## ")[1:]
    columns = [dict(re.findall(r"^\| (.+?) \| \S+ \| (\S+×) \|$", part, re.MULTILINE)) for part in models]
    titles = [part.partition("\n")[0].rpartition(", ")[0] for part in models]
    lines = [f"| training step | {' | '.join(titles)} |", "|---" * (1 + len(models)) + "|"]
    lines += [f"| {way} | {' | '.join(column[way] for column in columns)} |" for way in WAYS]
    begin, end = "<!-- cost of rspc -->\n", "<!-- end -->"
    before, _, rest = PAGE.read_text().partition(begin)
    PAGE.write_text(before + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--write", action="store_true", help=f"to {RESULTS.relative_to(RESULTS.parents[2])} and docs/training.md"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as in `bastion train`
    lines = ["# RSPC: what a training step costs", "", "`python -m benchmarks.rspc --write`, one thread.", ""]
    for name in chosen.models:
        lines += table(name, chosen.rounds)
        print("\n".join(lines[-17:]), flush=True)
    if chosen.write:
        RESULTS.write_text("\n".join(lines))
        write_page(RESULTS.read_text())


if __name__ == "__main__":
    main()

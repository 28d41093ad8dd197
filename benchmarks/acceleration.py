"""What each part of `accelerate(model)` is worth, on the whole of AutoAttack `standard` at linf 8/255.

    python -m benchmarks.acceleration                                  # measure what is not stored yet, print the table
    python -m benchmarks.acceleration --models zoo/cifar10-linf-vit --without "" folding --rounds 1

The same images are attacked with all parts, without one of them, and without any; rounds alternate between these. Two
processes of one thread share the images, as `bastion measure` does it with the default batch size. Results are appended
to `benchmarks/results/acceleration.jsonl` as they come: run it again to resume. The processor's time counts, not the
clock's, so that one core waiting for the other changes nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

from bastion import acceleration
from bastion.acceleration import accelerate, copying
from bastion.attacks.ensemble import AutoAttack
from bastion.attacks.judge import judge
from bastion.data import datasets
from bastion.threat import Threat
from benchmarks.autoattack import load_model

RESULTS = Path(__file__).parent / "results" / "acceleration.jsonl"
MODELS = ("zoo/cifar10-linf-resnet", "zoo/cifar10-linf-vit", "pyautoattack/resnet18")
BATCH = 128  # the default of `bastion measure`


def _plain_layout() -> None:
    plain = nn.Module.to

    def to(self: nn.Module, *args: Any, **options: Any) -> nn.Module:
        return self if options.get("memory_format") is torch.channels_last else plain(self, *args, **options)

    nn.Module.to = to  # type: ignore[method-assign]


OFF: dict[str, Callable[[], None]] = {
    "folding": lambda: setattr(copying, "_folded", lambda module: module),
    "channels-last": _plain_layout,
    "onednn": lambda: setattr(copying, "use_onednn", lambda _: None),
    "batch-size": lambda: setattr(acceleration, "BATCH_SIZES", (16, 16)),
}
ALL = "everything"


def work(name: str, without: str, n: int, part: int, batch: int) -> dict[str, float]:
    """Attack every second batch of images; seconds of the processor, and how many survive."""
    torch.set_num_threads(1)
    for switch in filter(None, without.split("+") if without != ALL else ()):
        OFF[switch]()
    model = accelerate(load_model(name), enabled=without != ALL)
    images = datasets.build("cifar10").test
    began, robust = time.process_time(), 0
    for start in range(part * batch, n, 2 * batch):
        examples = images.batch(range(start, min(start + batch, n)))
        verdict = judge(model, examples, AutoAttack(), Threat("linf", 8 / 255), seed=0)
        robust += int((verdict.clean & ~verdict.fooled).sum())
    return {"seconds": time.process_time() - began, "robust": robust}


def measure(name: str, without: str, n: int, batch: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.acceleration", "--part"]
    options = ["--models", name, "--without", without, "--n", str(n), "--batch", str(batch)]
    running = [subprocess.Popen([*command, str(part), *options], stdout=subprocess.PIPE) for part in (0, 1)]
    parts = [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]
    total = {key: sum(part[key] for part in parts) for key in ("seconds", "robust")}
    return {"model": name, "without": without, "n": n, "batch": batch, **total}


def stored() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []


def table(n: int, batch: int) -> str:
    """Seconds with all parts, and how many times as many without one."""
    rows = ["| model | images a batch | robust | seconds | without | ratio | runs |", "|---" * 7 + "|"]
    seconds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in stored():
        if (each["n"], each["batch"]) == (n, batch):
            seconds.setdefault((each["model"], each["without"]), []).append(each)
    for (model, without), runs in seconds.items():
        base = mean(each["seconds"] for each in seconds.get((model, ""), runs))
        own = mean(each["seconds"] for each in runs)
        ratio = f"{own / base:.2f}×" if without else ""
        cells = [model, str(batch), str(runs[0]["robust"]), f"{own:.0f}", without, ratio, str(len(runs))]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--without", nargs="+", default=["", *OFF, ALL], help="parts to leave out; a+b: both")
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        print(json.dumps(work(options.models[0], options.without[0], options.n, options.part, options.batch)))
        return
    for number in range(1, options.rounds + 1):
        for model in options.models:
            for without in options.without:
                key = {"model": model, "without": without, "n": options.n, "batch": options.batch}
                if sum(key.items() <= each.items() for each in stored()) < number:
                    result = measure(model, without, options.n, options.batch)
                    RESULTS.parent.mkdir(parents=True, exist_ok=True)
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(result) + "\n")
                    print(result, flush=True)
    print(table(options.n, options.batch))


if __name__ == "__main__":
    main()

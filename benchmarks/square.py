"""What Winograd's and Square's incremental convolutions are worth: queries of linf Square with and without them.

    OMP_NUM_THREADS=1 python -m benchmarks.square [MODEL …]

On test images of CIFAR-10 that the model classifies right, with squares of 4×4 pixels; eps is so small that all images
survive. Prints the processor's milliseconds a query, the best of some rounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from bastion.acceleration.incremental import Incremental
from bastion.acceleration.winograd import Winograd
from bastion.attacks import Threat
from bastion.attacks.square import Square
from bastion.data import datasets
from bastion.models.load import load, zoo_names
from bastion.types import Batch

QUERIES, SIDE, ROUNDS = 120, 4, 4
IMAGES = (45, 90)
THREAT = Threat("linf", 1e-4)


def no(*_: Any) -> bool:
    return False


def milliseconds(model: nn.Module, batch: Batch, pays: Callable[..., bool], learns: Callable[..., bool]) -> float:
    sides = patch.object(Square, "sides", lambda *_, **__: torch.full((QUERIES,), SIDE))
    with sides, patch.object(Winograd, "pays", pays), patch.object(Incremental, "_learns", learns):
        began = time.process_time()
        Square(queries=QUERIES)(model, batch, THREAT, seed=0)
        return 1000 * (time.process_time() - began) / QUERIES


def main() -> None:
    torch.set_num_threads(1)
    ways = {"neither": (no, no), "Winograd": (Winograd.pays, no), "windows": (no, Incremental._learns)}
    ways["both"] = (Winograd.pays, Incremental._learns)
    print(f"| model | images | {' | '.join(ways)} | speed |\n" + "|---" * (3 + len(ways)) + "|")
    some = datasets.build("cifar10").test.batch(range(200))
    for name in sys.argv[1:] or zoo_names():
        model = load(name).eval()
        with torch.no_grad():
            right = (model(some.x).argmax(1) == some.y).nonzero()[:, 0]
        for count in IMAGES:
            batch, best = some.select(right[:count]), dict.fromkeys(ways, float("inf"))
            for _ in range(ROUNDS):
                for way, (pays, learns) in ways.items():
                    best[way] = min(best[way], milliseconds(model, batch, pays, learns))
            times = " | ".join(f"{each:.1f}" for each in best.values())
            print(f"| {name} | {count} | {times} | {best['neither'] / best['both']:.2f}× |", flush=True)


if __name__ == "__main__":
    main()

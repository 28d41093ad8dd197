"""How the time per image depends on the batch size, for accelerated models. Sets `acceleration.CPU_CACHE`.

    python -m benchmarks.batch_size [MODEL …]

Prints milliseconds per image of a forward pass, and of one with the input's gradient, on one thread; the best of some
tries, because other processes only ever add time. `*` marks the batch size that `acceleration` chooses.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from bastion.acceleration import accelerate
from bastion.models.load import load, zoo_names

SIZES = (8, 16, 32, 64, 128, 256)
IMAGES = 1024  # for each figure


def best(call: Callable[[], object], tries: int) -> float:
    times = []
    for _ in range(tries):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or zoo_names():
        model = load(name)
        with accelerate(model).ready(torch.rand(2, *model.shape)) as accelerated:
            print(f"{name}\n{'batch':>6} {'forward':>9} {'gradient':>9}")
            for size in SIZES:
                x = torch.rand(size, *model.shape, requires_grad=True)

                def forward(x: torch.Tensor = x) -> None:
                    with torch.no_grad():
                        accelerated.logits(x)

                def gradient(x: torch.Tensor = x) -> None:
                    torch.autograd.grad(accelerated.logits(x).logsumexp(1).sum(), x)

                tries = max(IMAGES // size, 4)
                figures = [1000 * best(call, tries) / size for call in (forward, gradient)]
                chosen = " *" if size == accelerated.batch_size else ""
                print(f"{size:>6} {figures[0]:9.3f} {figures[1]:9.3f}{chosen}", flush=True)


if __name__ == "__main__":
    main()

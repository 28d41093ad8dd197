"""How often intervals hold if one looks at them while measuring, and how many examples that saves.

    python -m benchmarks.intervals

Measures a split of 10,000 examples of known accuracy in random order, looking after every 100. Prints how often the
accuracy of the split was inside the interval at every look, and where a measurement stopped that stops as soon as the
interval is narrow enough. Then the sample that the second phase of an attack needs,
for 10,000 images as a number and for fewer as a share of the survivors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from bastion.measuring.intervals import Estimate, wilson
from bastion.measuring.sampling import confidence_sequence, sample_size

POPULATION, EVERY, DRAWS = 10_000, 100, 1000
SETTINGS = ((0.535, 0.04), (0.535, 0.02), (0.01, 0.01))  # accuracy, and the width at which to stop
LOST = (0.0, 0.002, 0.005, 0.01, 0.02)


@functools.cache
def sequence(successes: int, n: int) -> Estimate:
    return confidence_sequence(successes, n, POPULATION)


def looks(accuracy: float, interval: Callable[[int, int], Estimate], draw: np.random.Generator) -> list[Estimate]:
    """The interval after every 100 examples, in one random order."""
    right = draw.permutation(np.arange(POPULATION) < round(accuracy * POPULATION)).cumsum()
    return [interval(int(right[n - 1]), n) for n in range(EVERY, POPULATION + 1, EVERY)]


def main() -> None:
    print("| accuracy | interval | inside at every look | stops when narrower than | inside then | examples |")
    print("|---" * 6 + "|")
    for accuracy, width in SETTINGS:
        for name, interval in {"Wilson": wilson, "sequence": sequence}.items():
            draw, always, stopped, examples = np.random.default_rng(0), 0, 0, 0
            for _ in range(DRAWS):
                seen = looks(accuracy, interval, draw)
                inside = [each.low <= accuracy <= each.high for each in seen]
                stop = next((i for i, each in enumerate(seen) if each.high - each.low < width), len(seen) - 1)
                always, stopped, examples = always + all(inside), stopped + inside[stop], examples + seen[stop].n
            shares = f"{always / DRAWS:.1%} | {100 * width:g} points | {stopped / DRAWS:.1%}"
            print(f"| {accuracy:.1%} | {name} | {shares} | {examples / DRAWS:,.0f} |", flush=True)
    print("\n| survivors of 10,000 | " + " | ".join(f"{share:.1%} lost" for share in LOST) + " |")
    print("|---" * (1 + len(LOST)) + "|")
    for survivors in (1000, 3000, 5000, 7000):
        sizes = [sample_size(survivors, POPULATION, lost_share=share) for share in LOST]
        print(f"| {survivors:,} | " + " | ".join(f"{size:,}" for size in sizes) + " |")
    print("\n| images, half of which survive | " + " | ".join(f"{share:.1%} lost" for share in LOST) + " |")
    print("|---" * (1 + len(LOST)) + "|")
    for n in (1000, 2000, 5000, 10_000):
        shares = [sample_size(n // 2, n, lost_share=share) / (n // 2) for share in LOST]
        print(f"| {n:,} | " + " | ".join(f"{share:.2f}" for share in shares) + " |")


if __name__ == "__main__":
    main()

"""Means and standard deviations that networks were trained with, by name."""

from __future__ import annotations

Stats = tuple[tuple[float, ...], tuple[float, ...]]  # mean, std

# What the code bases of the field normalise with. A checkpoint seldom says it.
NORMALISATIONS: dict[str, Stats] = {
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)),
    "cifar10-old": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),  # a slip that many repositories share
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}

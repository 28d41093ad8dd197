"""Means and standard deviations of common normalisations, by name."""

from __future__ import annotations

Stats = tuple[tuple[float, ...], tuple[float, ...]]  # mean, std

# Those that published code uses; checkpoints seldom store them.
NORMALISATIONS: dict[str, Stats] = {
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "mnist": ((0.1307,), (0.3081,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)),
    "cifar10-old": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),  # wrong, but used by many repositories
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}

"""How many passes of the model a suite takes for one image that survives everything; for docs/suites.md.

    python -m benchmarks.passes                  # all shipped suites
    python -m benchmarks.passes quick full

Counted by a hook on the model, probe by probe, on the zoo's ViT and an image of CIFAR-10 that it is sure of. Radii are
small, so that the image survives: they change no number of steps. Patches, whose pixels are free,
keep theirs; there the image that costs most of the four surest counts. So does the search for the nearest adversarial
example, which ends with success. `transfer` counts the source's passes too, which is the same model here.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bastion import acceleration, storage
from bastion.acceleration import Accelerated, accelerate
from bastion.data import datasets
from bastion.measuring.worker import build_case
from bastion.models.load import load
from bastion.probes import transfer
from bastion.recipe_files import shipped
from bastion.suite import Case, load_suite
from bastion.types import Batch, Probe

MODEL = "zoo/cifar10-linf-vit"
FREE = ("patch-occlusion", "patch-gaussian", "patch-pgd", "patch-fool")  # attacks without a radius


class Passes:
    """Images that went through a model forwards and backwards."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0

    def __call__(self, model: nn.Module, inputs: Any, logits: Tensor) -> None:
        self.forwards += len(logits)
        if logits.requires_grad:
            logits.register_hook(self._backward)

    def _backward(self, gradient: Tensor) -> None:
        self.backwards += len(gradient)


@contextmanager
def counted(model: nn.Module) -> Iterator[Passes]:
    passes = Passes()
    handle = model.register_forward_hook(passes)
    try:
        yield passes
    finally:
        handle.remove()


@functools.cache
def surest(model: Accelerated, count: int) -> Batch:
    """Of the first 100 test images."""
    batch = datasets.build("cifar10").test.batch(range(100))
    with torch.no_grad():
        logits = model.original(batch.x)
    sure = logits.softmax(1).gather(1, batch.y[:, None])[:, 0]
    return batch.select(sure.argsort(descending=True)[:count])


def count(model: Accelerated, case: Case, known: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Forward and backward passes of a probe."""
    spec = dict(case.spec)
    attack = spec.get("attack", {})
    free = (attack if isinstance(attack, str) else attack.get("name")) in FREE
    if "threat" in spec and not free:
        norm, eps = spec["threat"]["norm"], spec["threat"]["eps"]
        spec["threat"] = {"norm": norm, "eps": 1e-3 * {"linf": 8 / 255, "l2": 1, "l1": 12}[norm] if eps else 0.0}
    if "source" in spec:
        spec["source"] = MODEL
    key = storage.fingerprint(spec)
    if key not in known:
        probe = build_case(Case(case.label, case.base, case.kind, spec))
        assert isinstance(probe, Probe)
        several = free or spec["name"] == "distortion"
        found = []
        images = surest(model, 4)
        for row in range(4 if several else 1):
            with counted(model.original) as passes:
                probe(model, images.select(torch.tensor([row])), seed=0)
            found.append((passes.forwards, passes.backwards))
        known[key] = max(found, key=sum)
        print(f"  {case.label}: {known[key][0]:,} / {known[key][1]:,}", flush=True)
    return known[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*")
    torch.set_num_threads(1)
    acceleration.cheaper_copy = lambda model, _: model  # passes of the counted one itself
    model = accelerate(load(MODEL).eval(), enabled=False)
    transfer.other_model = lambda *_: model
    known: dict[str, tuple[int, int]] = {}
    for name in parser.parse_args().suites or shipped("suite"):
        cases = load_suite(name, ["size=4"] if name == "guo2023" else []).cases()
        passes = [count(model, case, known) for case in cases if case.kind == "probes"]
        forwards, backwards = (sum(column) for column in zip(*passes, strict=True))
        print(f"{name}: {len(passes)} probes, {forwards:,} / {backwards:,}", flush=True)


if __name__ == "__main__":
    main()

"""Identity of the model and data that facts belong to. A model is recognised, not hashed: its weights and modules must
be equal, and its logits on images of the data must agree up to rounding."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.fx
from torch import Tensor, nn

from bastion import forward, rng, storage
from bastion.errors import BastionError
from bastion.forward import device_of, frozen, in_mode, input_gradient
from bastion.measuring.describe_model import describe_modules, library_versions, same_modules, without_defaults
from bastion.models import checkpoint
from bastion.run import Run
from bastion.types import DataSet

IMAGES = 4  # of the data, whose logits and gradients are compared
LOGITS = 2e-3  # relative to the largest: machines, versions and batch sizes differ in rounding
SLOPES = 0.05  # relative to the largest: a ReLU whose input is nearly zero may be on or off by rounding
FILE = "identity.json"


@dataclass(frozen=True)
class Identity:
    """Identity of a model on a split of a data set."""

    weights: str
    data: dict[str, str]  # name, split, fingerprint and digest of its images; of its columns, if it has any
    modules: dict[str, dict[str, Any]]  # by their path: class and attributes
    logits: list[list[float]]
    slopes: list[list[float]]
    versions: dict[str, str] = field(default_factory=dict)  # of the libraries of its modules; older identities: none

    def matches(self, other: Identity) -> bool:
        upgraded = {name for name, version in self.versions.items() if other.versions.get(name) != version}
        return self.acts_as(other) and same_modules(self.modules, other.modules, upgraded)

    def acts_as(self, other: Identity) -> bool:
        """Whether weights and data are equal and logits agree: required of a copy in another process."""
        return (
            self.weights == other.weights
            and self.data == other.data
            and _close(self.logits, other.logits, LOGITS)
            and _close(self.slopes, other.slopes, SLOPES)
        )

    def folder(self, run: Run) -> Path:
        """Return the folder of a run with the facts of this model and data; create it if there is none."""
        for folder in storage.files(run.facts, "*"):
            if storage.is_file(folder / FILE) and self.matches(read_identity(folder)):
                return folder
        name = storage.fingerprint([self.weights, self.data, self.modules])
        for number in itertools.count(1):  # processes that do this at once all take the same one
            folder = run.facts / (name if number == 1 else f"{name}-{number}")
            if not storage.is_file(folder / FILE):
                storage.write_json(folder / FILE, dataclasses.asdict(self))
                return folder
            if self.matches(read_identity(folder)):
                return folder
        raise AssertionError


def read_identity(folder: Path) -> Identity:
    try:
        identity = Identity(**storage.read_json(folder / FILE))
        return identity if identity.versions else replace(identity, modules=without_defaults(identity.modules))
    except TypeError as error:
        raise BastionError(f"{folder / FILE}: not an identity of facts; remove {folder} and measure again") from error


def identify(model: nn.Module, data: DataSet, split: str) -> Identity:
    images = data.split(split)
    modules = describe_modules(model)  # before it runs
    logits, slopes = _logits_and_slopes(model, images.batch(range(min(IMAGES, len(images)))).x)
    columns = {"columns": storage.fingerprint(list(data.columns))} if data.columns is not None else {}
    return Identity(
        weights=checkpoint.digest(model),
        data={"name": data.name, "split": split, "fingerprint": data.fingerprint, "digest": images.digest(), **columns},
        modules=modules,
        logits=logits.tolist(),
        slopes=slopes.tolist(),
        versions=library_versions(model),
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Run on one thread, so that sums are added in the same order on every machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _logits_and_slopes(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits (B, K) and the slope of the largest logit along four fixed directions (B, 4)."""
    x = images.to(device_of(model)).requires_grad_()
    with torch.enable_grad(), in_mode(model, training=False), rng.preserved(), one_thread(), frozen(model):
        rng.reseed("identity")
        logits = forward.logits(model, x)
        try:
            gradient = input_gradient(logits.amax(1), x)
        except RuntimeError:  # a model that cannot be differentiated can still be measured
            gradient = torch.zeros_like(x)
    directions = rng.signs(0, torch.arange(4), "identity", images.shape[1:]).flatten(1).double()
    return logits.detach().cpu().double(), gradient.flatten(1).cpu().double() @ directions.T


def _close(ours: list[list[float]], theirs: list[list[float]], tolerance: float) -> bool:
    a, b = np.array(ours), np.array(theirs)
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return False
    a, b = np.nan_to_num(a, posinf=0, neginf=0), np.nan_to_num(b, posinf=0, neginf=0)
    return bool(np.abs(a - b).max(initial=0) <= tolerance * np.abs(a).max(initial=0))

"""bastion: train, attack and explain robust image classifiers, Vision Transformers first.

import bastion

model = bastion.load("runs/my-run")                     # pixels in [0, 1] in, logits out
facts = bastion.measure(model, data="cifar10-mini", suite="demo", limit=200)
print(facts.table())                                    # accuracy and its 95 % interval, per attack
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

from bastion import _torchvision
from bastion.errors import BastionError, did_you_mean

if TYPE_CHECKING:
    from bastion.measuring.compare import compare
    from bastion.measuring.evaluate import attack, evaluate
    from bastion.measuring.runner import measure
    from bastion.models.load import load
    from bastion.models.wrap import wrap
    from bastion.reporting.html import report
    from bastion.threat import Threat
    from bastion.training.trainer import train

__all__ = ["BastionError", "Threat", "attack", "compare", "evaluate", "load", "measure", "report", "train", "wrap"]

_torchvision.install()

# Imported on first use: `bastion --help` and reports need no torch.
_HOMES = {
    "Threat": "bastion.threat",
    "attack": "bastion.measuring.evaluate",
    "compare": "bastion.measuring.compare",
    "evaluate": "bastion.measuring.evaluate",
    "load": "bastion.models.load",
    "measure": "bastion.measuring.runner",
    "report": "bastion.reporting.html",
    "train": "bastion.training.trainer",
    "wrap": "bastion.models.wrap",
}


_PACKAGES = ("attacks", "compat", "data", "models", "probes", "studies")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_PACKAGES, "__version__"})


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"bastion.{name}")
    if name == "__version__":
        return metadata.version("bastion")
    if name not in _HOMES:
        if name[:1].isupper() and hasattr(importlib.import_module("bastion.attacks"), name):
            # `from bastion import PGD` shows the text of an ImportError only.
            raise ImportError(f"{name} is an attack: from bastion.attacks import {name}")
        raise AttributeError(f"module 'bastion' has no attribute '{name}'{did_you_mean(name, _HOMES)}")
    return getattr(importlib.import_module(_HOMES[name]), name)

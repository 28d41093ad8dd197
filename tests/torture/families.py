"""Every family of the registry, trained for a while and without a defence: `demo` must not warn of any.

    python -m tests.torture.families --minutes 60
    python -m tests.torture.families --only cifar/cct vit      # these again

The smallest model of each family is trained on a part of cifar10-mini, on images of 32 pixels where the network can be
made for them, else enlarged to its own size. A warning of a model that is better than guessing is a false alarm.
Results are appended to a file, and a family that stands there is not tried again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from bastion import BastionError
from bastion.errors import Interrupted
from bastion.measuring.runner import measure
from bastion.models import models
from bastion.models.model_stats import stored
from bastion.training.trainer import train
from tests.torture.record import Record

DATA = "cifar10-mini"
TRAINING = ("data=cifar10-mini", "batch=100", "schedule.warmup_epochs=1", "validate.every=1000", "validate.limit=100")
ACCURACY = {"at-chance", "one-class"}  # warnings of another kind: not of gradients


def smallest() -> dict[str, str]:
    """The model of each family that takes the fewest multiplications; `cifar/` has many families."""
    known = stored()
    names = sorted((name for name in models.names() if name in known), key=lambda name: -known[name].macs)
    found = {name if name.startswith("cifar/") else name.partition("/")[0]: name for name in names}
    return dict(reversed(found.items()))  # the fastest first


def trained(name: str, changes: tuple[str, ...], folder: Path) -> Path:
    given = (*TRAINING, *changes, f"model={name}")
    try:
        return train("tiny/demo-standard", changes=given, folder=folder / "small").folder
    except Interrupted:
        raise
    except BastionError:  # it is not made for 32 pixels
        return train("tiny/demo-standard", changes=(*given, "resize=bilinear"), folder=folder / "enlarged").folder


def outcome(name: str, changes: tuple[str, ...], images: int) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = trained(name, changes, Path(folder))
        facts = measure(run, DATA, "demo", limit=images)
        found = {label: round(100 * each.value, 1) for label, each in facts.accuracies().items()}
        codes = [each.code for each in facts.warnings()]
    return {"model": name, **found, "warnings": codes, "seconds": round(time.monotonic() - began)}


def verdict(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"FAILED: {result['error']}"
    if set(result["warnings"]) & ACCURACY:
        return "not better than guessing"
    return f"FALSE ALARM: {', '.join(result['warnings'])}" if result["warnings"] else "no warning"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--train", type=int, default=2000, help="training images")
    parser.add_argument("--images", type=int, default=64, help="test images")
    parser.add_argument("--only", nargs="*", choices=list(smallest()), metavar="FAMILY", help="only these, once more")
    parser.add_argument("--results", type=Path, default=Path("torture/families.jsonl"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    record, began = Record(given.results), time.monotonic()
    changes = (f"schedule.epochs={given.epochs}", f"train_limit={given.train}")
    for family, name in smallest().items():
        if family in record.results if given.only is None else family not in given.only:
            continue
        if time.monotonic() - began > 60 * given.minutes:
            break
        try:
            result = outcome(name, changes, given.images)
        except Interrupted:
            raise
        except BastionError as error:
            result = {"model": name, "error": str(error)}
        record.add(family, result)
        print(f"{family:<24} {verdict(result)}", flush=True)
    said = [verdict(result) for result in record.results.values()]
    bad = sum(each.startswith(("FALSE ALARM", "FAILED")) for each in said)
    guessing = said.count("not better than guessing")
    print(f"{len(said)} of {len(smallest())} families: {bad} false alarms or failures, {guessing} learnt nothing")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())

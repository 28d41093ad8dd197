"""Networks that others trained and published: their numbers beside bastion's. Writes docs/trust.md.

    python -m scripts.trust --models FOLDER --mnist FOLDER         # measure what is not stored yet, write the page
    python -m scripts.trust --models FOLDER --mnist FOLDER --only fgsm --scale 5   # one network, five times the images

`--models` has the files of the networks, `--mnist` MNIST's IDX files; CIFAR-10 must be there (`bastion data get
cifar10`). Facts go to `--runs`; run the same command to resume.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.autoattack import by_reference, without_checks
from scripts.published_networks import fgsm_trained, lenet, resnet18, resnet_2b
from torch import nn

from bastion import storage
from bastion.data import datasets
from bastion.measuring.facts import Facts
from bastion.measuring.intervals import Estimate, mean, wilson
from bastion.measuring.runner import measure
from bastion.threat import Threat

PAGE = Path(__file__).parents[1] / "docs" / "trust.md"
BOX = {"linf": 1.0, "l2": 28.0, "l1": 784.0}  # of MNIST's images: no adversarial example is farther away
ALL = 10_000  # test images, of MNIST as of CIFAR-10


@dataclass(frozen=True)
class Claim:
    """A number that was published, and the probe that measures it here."""

    what: str
    n: int  # images here; published numbers are of all 10,000
    probe: Any
    published: str
    low: float  # where the published numbers say that ours must be, as fractions
    high: float
    of: str = "robust"  # or "fooled": the share of right answers that the attack changes


@dataclass(frozen=True)
class Distance:
    """The published distances of the adversarial examples that FAB finds in 20 steps."""

    norm: str
    median: float
    mean: float
    n: int = 100

    @property
    def probe(self) -> Any:
        attack = {"name": "fab", "steps": 20, "keep": "nearest"}
        return {"name": "adversarial", "threat": {"norm": self.norm, "eps": BOX[self.norm]}, "attack": attack}


@dataclass(frozen=True)
class Network:
    title: str
    source: str
    load: Callable[[Path], nn.Module]
    data: str
    claims: Sequence[Claim]
    distances: Sequence[Distance] = ()


def attacked(norm: str, eps: float, attack: Any) -> Any:
    return {"name": "adversarial", "threat": {"norm": norm, "eps": eps}, "attack": attack}


def exactly(what: str, percent: float, n: int, probe: Any, of: str = "robust") -> Claim:
    return Claim(what, n, probe, f"{percent:g} %", percent / 100, percent / 100, of)


def clean(percent: float, n: int = ALL) -> Claim:
    return exactly("clean", percent, n, "accuracy")


def verified(levels: int, pgd: float, bound: float) -> Claim:
    """An attack leaves at most what PGD leaves, and at least what is proven."""
    what, published = f"AutoAttack, linf {levels}/255", f"PGD {pgd:g} %, verified {bound:g} %"
    return Claim(what, 200, attacked("linf", levels / 255, "autoattack"), published, bound / 100, pgd / 100)


PGD_40 = {"name": "pgd", "steps": 40, "step": 0.01, "random_start": False}
STANDARD = (Distance("linf", 0.112, 0.1092), Distance("l2", 1.423, 1.412), Distance("l1", 7.61, 8.365))
ROBUST = (Distance("linf", 0.3509, 0.3476), Distance("l2", 3.04, 3.205), Distance("l1", 112.8, 114.6))
NETWORKS = {
    "fgsm": Network(
        "MNIST, FGSM-trained",
        "Wong et al. 2020; AutoAttack's own table",
        fgsm_trained,
        "mnist",
        (
            clean(98.50),
            exactly("AutoAttack, linf 0.3", 82.93, 1000, attacked("linf", 0.3, "autoattack")),
        ),
    ),
    "lenet-standard": Network(
        "MNIST LeNet, standard",
        "advertorch; FAB's authors",
        partial(lenet, kind="clntrained"),
        "mnist",
        (clean(98.89),),
        STANDARD,
    ),
    "lenet-robust": Network(
        "MNIST LeNet, PGD-trained",
        "advertorch; FAB's authors",
        partial(lenet, kind="advtrained"),
        "mnist",
        (
            clean(98.64),
            exactly("fooled by PGD-40, step 0.01, linf 0.3", 6.8, 1000, attacked("linf", 0.3, PGD_40), "fooled"),
        ),
        ROBUST,
    ),
    "resnet-2b": Network(
        "CIFAR-10 ResNet-2b",
        "VNN-COMP 2021; verified by CROWN",
        resnet_2b,
        "cifar10",
        (clean(69.25), verified(1, 62.24, 57.16), verified(2, 54.82, 26.88)),
    ),
    "resnet18": Network(
        "CIFAR-10 ResNet-18, standard",
        "the package of AutoAttack's official code",
        resnet18,
        "cifar10",
        (clean(94.6, 200), exactly("AutoAttack, linf 8/255", 0.0, 16, attacked("linf", 8 / 255, "autoattack"))),
    ),
}


def facts_of(name: str, each: Claim | Distance, chosen: argparse.Namespace) -> Facts:
    """What is stored is not measured again."""
    network = NETWORKS[name]
    data = {"name": "mnist", "root": str(chosen.mnist)} if network.data == "mnist" else network.data
    suite = {"probes": {"clean": "accuracy", **({} if each.probe == "accuracy" else {"attack": each.probe})}}
    options: dict[str, Any] = {
        "limit": min(ALL, each.n * chosen.scale),
        "workers": chosen.workers,
        "folder": chosen.runs / name,
        "keep": 0,
    }
    return measure(network.load(chosen.models), data, suite, **options)


def estimate(claim: Claim, facts: Facts) -> Estimate:
    if claim.probe == "accuracy":
        return facts.accuracies()["clean"]
    if claim.of == "robust":
        return facts.accuracies()["attack"]
    right = facts.correct("clean")
    return wilson(int((right & ~facts.correct("attack")).sum()), int(right.sum()))


def agrees(claim: Claim, found: Estimate) -> bool:
    """All images: to the digits that were published. Some: the interval reaches what was published."""
    if found.n == ALL:
        return claim.low - 5e-5 <= found.value <= claim.high + 5e-5
    return found.low <= claim.high and found.high >= claim.low


def accuracy_rows(name: str, chosen: argparse.Namespace) -> Iterator[str]:
    network = NETWORKS[name]
    for claim in network.claims:
        found = estimate(claim, facts_of(name, claim, chosen))
        interval = "" if found.n == ALL else f" [{100 * found.low:.2f}, {100 * found.high:.2f}]"
        ours, told = f"{100 * found.value:.2f} %{interval}", "yes" if agrees(claim, found) else "**no**"
        yield f"| `{name}` | {claim.what} | {claim.published} | {ours} | {found.n:,} | {told} |"


def distance_rows(name: str, chosen: argparse.Namespace) -> Iterator[str]:
    for each in NETWORKS[name].distances:
        facts = facts_of(name, each, chosen)
        found = np.asarray(facts.columns["attack/distance"], dtype=np.float64)
        found = found[np.isfinite(found)]
        average = mean(found)
        ours = f"{np.median(found):.4g} / {average.value:.4g} [{average.low:.4g}, {average.high:.4g}]"
        told = "yes" if average.low <= each.mean else "**no**"
        theirs, share = f"{each.median:g} / {each.mean:g}", f"{len(found)} of {int(facts.correct('clean').sum())}"
        yield f"| `{name}` | {each.norm} | {theirs} | {ours} | {share} | {told} |"


def beside_the_reference(chosen: argparse.Namespace) -> str:
    """What AutoAttack's official code says of the same images, for `fgsm`."""
    without_checks()
    network, (start, stop) = NETWORKS["fgsm"], chosen.reference
    split = datasets.build({"name": "mnist", "root": str(chosen.mnist)}).test
    batch = split.batch(range(start, stop))
    theirs = by_reference(network.load(chosen.models).eval(), batch, Threat("linf", 0.3), "standard").robust
    ours = facts_of("fgsm", network.claims[1], chosen).correct("attack")[start:stop]
    agree = int((np.asarray(theirs) == ours).sum())
    right = f"right {int(ours.sum())}, by the official code {int(np.sum(theirs))}"
    return f"images {start} to {stop - 1}: {right}; {agree} agree"


def page(names: Sequence[str], chosen: argparse.Namespace) -> str:
    networks = [f"| `{name}` | {NETWORKS[name].title} | {NETWORKS[name].source} |" for name in names]
    accuracies = [row for name in names for row in accuracy_rows(name, chosen)]
    distances = [row for name in names for row in distance_rows(name, chosen)]
    differs = any(row.startswith("| `fgsm` | AutoAttack") and "**no**" in row for row in accuracies)
    lines = [
        HEAD,
        "| name | network | from |\n| --- | --- | --- |",
        *networks,
        ACCURACIES,
        "| network | measured | published | bastion | n | agrees |\n| --- | --- | --- | --- | --- | --- |",
        *accuracies,
        DISTANCES,
        "| network | norm | published | bastion | fooled | agrees |\n| --- | --- | --- | --- | --- | --- |",
        *distances,
        *([DISAGREEMENT] if differs else []),
        TAIL,
    ]
    return "\n".join(lines)


HEAD = """# Numbers that others published, and ours

Networks that nobody here trained, measured by bastion beside what their authors, or the authors of the attacks,
published. One command makes this page:

```console
$ python -m scripts.trust --models FOLDER --mnist FOLDER
```

`--models` is a folder with the published files of the networks (`scripts/published_networks.py` says which),
`--mnist` one with MNIST's IDX files. It stores what it measures in `runs/trust` and resumes when it is run again;
`--only NAME` measures one network, `--scale 5` five times the images. The published numbers are of all 10,000 test
images; n is how many of them, the first ones, were measured here.
"""
ACCURACIES = """
## Accuracies

Images classified right, with 95 % intervals where not all images were measured. A row agrees if the number is the
published one to its last digit, or, of some images, if the published number is in the interval. For the network with
verified bounds a right attack ends between what is proven and what a plain PGD left.
"""
DISTANCES = """
## Distances

FAB with 20 steps: median / mean distance of the adversarial examples found for images that are classified right. The
published ones are by FAB's authors; nearer is better, so a row agrees unless the whole interval of the mean is above
the published mean.
"""
DISAGREEMENT = """
## The row that does not agree

The first 1,000 images leave `fgsm` less accuracy than all 10,000 did. It is the images: AutoAttack's official code
gives the same verdict as bastion on each of images 0 to 119 and 400 to 519, as this command says:

```console
$ python -m scripts.trust --models FOLDER --mnist FOLDER --reference 400 520
```
"""
TAIL = """
## What this does not show

Not every number is of all images: n says so. With 200 images or fewer a row rules out gross errors, no more;
`--scale` measures more. No network here is as large as those of RobustBench's leaderboard. On
networks of bastion's own, AutoAttack is compared with the official code image by image
([attacks](attacks.md#beside-the-reference)).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder with the networks' files")
    parser.add_argument("--mnist", type=Path, required=True, help="folder with MNIST's IDX files")
    parser.add_argument("--runs", type=Path, default=Path("runs/trust"), help="where facts are stored")
    parser.add_argument("--only", choices=list(NETWORKS), help="measure this network, and write no page")
    parser.add_argument("--scale", type=int, default=1, help="so many times the images")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--reference", nargs=2, type=int, metavar=("START", "STOP"), help="the official code on these images of `fgsm`"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.reference:
        print(beside_the_reference(chosen))
    elif chosen.only:
        print("\n".join([*accuracy_rows(chosen.only, chosen), *distance_rows(chosen.only, chosen)]))
    else:
        storage.write_text(PAGE, page(list(NETWORKS), chosen))
        print(PAGE)


if __name__ == "__main__":
    main()

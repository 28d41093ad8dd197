"""Inside the zoo's models and standard twins of them: what of five papers' claims holds, with pictures.

    python -m scripts.understanding_study             # train, measure, write docs/understanding.md; run again to resume
    python -m scripts.understanding_study --page      # write the page anew from what is measured
    python -m scripts.understanding_study --small     # the same in miniature, in runs/understanding-small/

Two processes of one thread train and measure in `runs/understanding-study/`. Of each model the facts that the page and
its pictures read are kept in `benchmarks/results/understanding/`: what is there is not measured again, also elsewhere;
remove a folder to have it measured anew. CIFAR-10 must be there (`bastion data get cifar10`), and Chromium for the
pictures.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from scripts.study import PROCESSES, in_processes
from scripts.understanding_claims import (
    JUDGES,
    MODELS,
    NETWORKS,
    claim_rows,
    claims_table,
    judges_table,
    models_table,
    networks_table,
    read,
    summary_table,
)

MODULE = "scripts.understanding_study"
ROOT = Path(__file__).parents[1]
DATA = "cifar10"
DRAWN = 8  # examples of which pictures are kept: figures have six, of those that most models get right
ZOO = {"vit": "zoo/cifar10-linf-vit", "resnet": "zoo/cifar10-linf-resnet"}


@dataclass(frozen=True)
class Sizes:
    """What decides how long it takes; the defaults are those of the page."""

    home: Path = Path("runs") / "understanding-study"
    results: Path = ROOT / "benchmarks" / "results" / "understanding"
    docs: Path = ROOT / "docs"
    train: int = 50_000  # images for the twins
    epochs: tuple[tuple[str, float], ...] = (("vit", 7), ("resnet", 4))
    network_train: int = 15_000  # images for the eight small networks
    network_epochs: float = 3
    images: int = 64  # for singular values, growth and distances of the four models
    norms: int = 8  # for the bound of Table 2, which takes a product for each number of a block
    network_images: int = 64
    network_norms: int = 16
    pictures: int = 100  # for perturbations, synthesis and input gradients
    accuracy: int = 500  # for clean and robust accuracy
    steps: int = 100  # of the search for perturbations and made images
    grid: int = 11  # points of an axis of the landscape
    loss: int = 64  # images for landscape and sharpness
    directions: int = 6  # lines through the landscape, for an interval
    lemma: int = 500  # images for Lemma 1
    units: int = 200  # steps of feature visualisation
    networks: tuple[str, ...] = tuple(NETWORKS)
    drawn: tuple[str, ...] = ("vit-t3", "vit-t4", "covit-t3", "covit-t4")


SMALL = Sizes(
    home=Path("runs") / "understanding-small",
    results=Path("runs") / "understanding-small" / "results",
    docs=Path("runs") / "understanding-small" / "docs",
    train=256,
    epochs=(("vit", 2), ("resnet", 2)),
    network_train=256,
    network_epochs=1,
    images=4,
    norms=1,
    network_images=4,
    network_norms=1,
    pictures=4,
    accuracy=8,
    steps=5,
    grid=3,
    loss=8,
    directions=3,
    lemma=100,
    units=5,
    networks=("vit-t1", "vit-t2", "covit-t1", "covit-t2"),
    drawn=("vit-t1", "vit-t2", "covit-t1", "covit-t2"),
)


class Part(NamedTuple):
    """One call of `measure`."""

    suite: str | dict[str, Any]
    images: int
    changes: tuple[str, ...] = ()
    seed: int = 0
    pictures: int = 0  # examples of which they are kept

    @property
    def name(self) -> str:
        asked = [self.suite] if isinstance(self.suite, str) else [key for each in self.suite.values() for key in each]
        return f"{', '.join(asked)} on {self.images} images"


def parts_of_model(sizes: Sizes) -> list[Part]:
    """All that the four models are asked."""
    return [
        Part("generalization", sizes.accuracy),
        Part("jacobian", sizes.images, ("eps=1/255",)),  # small, as the bounds are of first order
        Part({"probes": {"table-2": "jacobian-norms"}}, sizes.norms),
        *_weights_and_loss(sizes),
        *_perturbations(sizes),
    ]


def _weights_and_loss(sizes: Sizes) -> Iterator[Part]:
    yield Part("weights", 1, (f"studies.lemma-1.images={sizes.lemma}",))
    yield Part({"studies": {"sharpness": {"name": "sharpness", "n": sizes.loss}}}, 1)
    yield Part("landscape", 1, (f"studies.landscape.n={sizes.loss}", f"studies.landscape.points={sizes.grid}"))
    attacked = {"threat": {"norm": "linf", "eps": 8 / 255}, "attack": {"name": "pgd", "steps": 5, "rel_step": 0.4}}
    line = {"name": "landscape", "dimensions": 1, "points": 5, "radius": 0.5, "n": 2 * sizes.loss, **attacked}
    for seed in range(sizes.directions):
        yield Part({"studies": {"line": line}}, 1, seed=seed)


def _perturbations(sizes: Sizes) -> Iterator[Part]:
    judges = [str(sizes.home / name) for name in JUDGES]
    steps = {
        "probes.perturbation.attack.steps": sizes.steps,
        "probes.perturbation.attack.rel_step": 1.5 / sizes.steps,
        "probes.from-noise.steps": sizes.steps,
        "probes.from-images.steps": sizes.steps,
        "studies.logits.steps": sizes.units,
        "studies.penultimate.steps": sizes.units,
    }
    changes = (f"classifiers=[[{', '.join(judges)}]]", *(f"{key}={value}" for key, value in steps.items()))
    yield Part("interpretability", sizes.pictures, changes, pictures=DRAWN)
    far = {"name": "synthesis", "eps": 4, "steps": sizes.steps, "classifiers": judges}
    probes = {f"far-{name}": {**far, "start": start} for name, start in (("noise", "noise"), ("images", "image"))}
    yield Part({"probes": probes}, sizes.pictures, pictures=DRAWN)


def parts_of_network(sizes: Sizes) -> list[Part]:
    """What the small ViTs and CoViTs are asked."""
    fgsm = {"name": "adversarial", "threat": {"norm": "linf", "eps": 2 / 255}, "attack": "fgsm"}
    return [
        Part({"probes": {"clean": "accuracy", "fgsm": fgsm}}, sizes.accuracy),
        Part("jacobian", sizes.network_images, ("eps=1/255", "probes.jacobian.parts=[branch, block]")),
        Part({"probes": {"table-2": "jacobian-norms"}}, sizes.network_norms),
    ]


def measure_parts(model: Any, home: Path, parts: Iterable[Part]) -> None:
    from bastion.measuring.runner import measure

    for part in parts:
        began = time.process_time()
        options: dict[str, Any] = {"limit": part.images, "seed": part.seed, "keep": part.pictures}
        measure(model, DATA, part.suite, changes=part.changes, folder=home, **options)
        print(f"{home.name}, {part.name}: {time.process_time() - began:.0f} s of the processor", flush=True)


def keep(name: str, sizes: Sizes) -> None:
    """Copy what the page and its pictures read of a run, all or nothing."""
    run, unfinished = sizes.home / name, sizes.results / f".{name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    for part in ("facts", "measurements"):
        shutil.copytree(run / part, unfinished / part)
    shutil.copy(run / "provenance.json", unfinished)
    unfinished.rename(sizes.results / name)


def is_kept(name: str, sizes: Sizes) -> bool:
    return (sizes.results / name).is_dir()


def train_once(recipe: str, home: Path, *changes: str) -> None:
    from bastion.training.trainer import train

    train(recipe, changes=(f"data={DATA}", *changes), folder=home, resume=(home / "recipe.yaml").is_file())


def train_twin(name: str, sizes: Sizes) -> None:
    """The zoo's recipe with standard training in the place of the attack, and fewer epochs."""
    kind = name.removeprefix("standard-")
    train_once(
        ZOO[kind],
        sizes.home / name,
        "objective={name: standard, label_smoothing: 0.1}",
        "validate.attack=null",
        f"train_limit={sizes.train}",
        f"schedule.epochs={dict(sizes.epochs)[kind]}",
    )


def measure_model(name: str, sizes: Sizes) -> None:
    robust, _, kind = name.partition("-")
    home = sizes.home / name
    measure_parts(ZOO[kind] if robust == "robust" else home, home, parts_of_model(sizes))
    keep(name, sizes)


def network(name: str, sizes: Sizes) -> None:
    """A small ViT or CoViT of Wang and Ruan, for images of 32 pixels with patches of 8: trained, then measured."""
    home = sizes.home / name
    train_once(
        "base/micro",
        home,
        f"model={{name: {NETWORKS[name]}, img_size: 32, patch_size: 8}}",
        f"train_limit={sizes.network_train}",
        f"schedule.epochs={sizes.network_epochs}",
        "validate.limit=500",
    )
    if is_kept(name, sizes):  # measured before; it was trained again for what looks at it
        return
    measure_parts(home, home, parts_of_network(sizes))
    keep(name, sizes)


def untrained(name: str, sizes: Sizes) -> None:
    """The weights that the network's training began with."""
    from bastion.data import datasets
    from bastion.recipe import load_recipe
    from bastion.training.build import build_model

    trained = sizes.home / name.removeprefix("untrained-")
    model = build_model(load_recipe(trained / "recipe.yaml"), datasets.build({"name": DATA}))
    suite = {"probes": {"jacobian": {"name": "jacobian", "parts": ["branch", "block"]}}}
    measure_parts(model, sizes.home / name, [Part(suite, sizes.network_norms)])
    keep(name, sizes)


# Of a job on one core, from what one image takes in training and in each part.
MINUTES = {"twin": 10.5, "network": 4.5, "untrained": 0.5, "model": 12}
JOBS = {"twin": train_twin, "network": network, "untrained": untrained, "model": measure_model}


def run(kind: str, name: str, sizes: Sizes) -> None:
    import torch

    torch.set_num_threads(1)
    JOBS[kind](name, sizes)


def jobs(sizes: Sizes) -> list[list[tuple[str, str]]]:
    """Those whose facts are not kept, and those that train what these look at or begin from."""
    models = not all(is_kept(name, sizes) for name in MODELS)

    def is_needed(kind: str, name: str) -> bool:
        if kind == "twin":
            return models
        if kind == "network" and (not is_kept(f"untrained-{name}", sizes) or (models and name in JUDGES)):
            return True
        return not is_kept(name, sizes)

    return [[job for job in some if is_needed(*job)] for some in all_jobs(sizes)]


def all_jobs(sizes: Sizes) -> list[list[tuple[str, str]]]:
    """In rounds: the four models are looked at by those that the first round trains. The longest first."""
    twins = [("twin", name) for name in ("standard-resnet", "standard-vit")]
    networks = [("network", name) for name in sorted(sizes.networks, reverse=True)]
    models = [("model", name) for name in reversed(MODELS)]
    return [[*twins, *networks], [*models, *(("untrained", f"untrained-{name}") for name in sizes.networks)]]


def minutes(sizes: Sizes) -> float:
    """Of all jobs, in two processes."""
    return sum(MINUTES[kind] for some in jobs(sizes) for kind, _ in some) / PROCESSES


def run_jobs(sizes: Sizes) -> None:
    if sizes is SMALL:  # in this process: importing torch would take most of the time
        for job in itertools.chain(*jobs(sizes)):
            run(*job, sizes)
        return
    print(f"about {minutes(sizes):.0f} minutes on two cores; what is stored is not done again", flush=True)
    for some in jobs(sizes):
        in_processes(MODULE, some, sizes.home / "logs")


PICTURES = {
    "understanding-blocks": ["jacobian: largest singular value of each block with"],
    "understanding-growth": ["growth: growth of perturbations"],
    "understanding-distances": ["jacobian: singular values and smallest"],
    "understanding-attention": ["attention: Lipschitz"],
    "understanding-sparsity": ["Sparsity of the weights"],
    "understanding-landscape": ["Contours of the clean", "Contours of the adversarial"],
    "understanding-sharpness": ["Sharpness"],
    "understanding-lemma": ["Rademacher complexity of linear classifiers, ε = 1"],
    "understanding-perturbations": ["Perturbations as pictures"],
    "understanding-synthesis": ["Images made for a class (from-noise)"],
    "understanding-saliency": ["Input gradients as pictures (saliency)"],
}
NETWORK_PICTURES = {
    "understanding-networks": [
        f"jacobian: largest singular value of each block{rest}" for rest in (" with", "'s branch")
    ]
}
WIDTH = 1080  # pixels: room for the widest table


def draw(sizes: Sizes) -> None:
    """Figures of two reports: of the four models, and of the deeper small networks."""
    from scripts.report_picture import save_pictures

    from bastion.reporting.html import report

    sizes.home.mkdir(parents=True, exist_ok=True)
    models = report([sizes.results / name for name in MODELS], sizes.home / "models.html")
    networks = report([sizes.results / name for name in sizes.drawn], sizes.home / "networks.html")
    for page, wanted in ((models, PICTURES), (networks, NETWORK_PICTURES)):
        save_pictures(page, {sizes.docs / f"{name}.png": titles for name, titles in wanted.items()}, WIDTH)


TEMPLATE = """# What is inside the zoo's models

Five papers say what robust models look like inside. Here the zoo's two models stand beside standard twins, in [singular
values of Jacobians](jacobian.md), [weights and loss](weights-and-loss.md) and [perturbations and
gradients](interpretability.md); the last section says which of the papers' claims hold on them.

```text
bastion data get cifar10
python -m scripts.understanding_study        # within an hour on two cores; resumable; writes this page
```

The facts that the page reads are in `benchmarks/results/understanding/`; with `--page` it is drawn from them.

`robust-vit` and `robust-resnet` are `zoo/cifar10-linf-vit` and `zoo/cifar10-linf-resnet`. Their twins have the same
architecture and recipe with the objective `standard`, for {vit_epochs} epochs instead of 18 and {resnet_epochs} instead
of 11, on {train:,} images.

Where a claim is about architectures, there are {count} small networks of Wang and Ruan's Table 1: ViT and CoViT of
depth 4 (t1, t2) and 8 (t3, t4), with one head or kernel (t1, t3) and four (t2, t4), for images of 32 pixels in patches
of 8.
They are trained with AdamW on {network_train:,} images for {network_epochs} epochs; the paper takes SAM, larger images
and far more of both. All models have one seed: intervals are over images, networks or directions, none over trainings.

## Numbers

{models}

Accuracies are of {accuracy} test images: clean, under APGD-CE of 20 steps at ℓ∞ 8/255, ℓ2 0.5 and ℓ1 12, and the worst
case of these. Singular values are of {images}: σ̄ is the largest of x + F(x) over the blocks, of images that are
classified right; Σσ is over the blocks, of F. The distance is of the nearest adversarial example that FAB finds. Losses
and their Hessian are of training images.

{networks}

FGSM is at ℓ∞ 2/255, singular values are of {network_images} images, and the bound of Table 2 of {network_norms}.

## Singular values

![Largest singular value of each block of the four models](understanding-blocks.png)

![The same of ViT and CoViT of depth 8, with and without the skip connection](understanding-networks.png)

![Growth of a perturbation of 1/255 from block to block, beside the bounds of Eq. 15](understanding-growth.png)

![Distance of the nearest adversarial example over the sum of singular values](understanding-distances.png)

![Lipschitz constant of attention, measured and bounded](understanding-attention.png)

## Weights and loss

![Histograms of the weights by kind](understanding-sparsity.png)

![Contours of the clean and the adversarial loss around the weights](understanding-landscape.png)

![Largest eigenvalues of the Hessian](understanding-sharpness.png)

![Rademacher complexity of linear classifiers over the dimension](understanding-lemma.png)

## Perturbations and gradients

![Perturbations of the four models as pictures](understanding-perturbations.png)

![Images made for a class from noise](understanding-synthesis.png)

![Saliency maps of the four models](understanding-saliency.png)

Who recognises the class, in % of {pictures} images; chance is 10 %. −δ is the picture (ε − δ) / 2ε of a perturbation of
4/255, δ the other sign. Images are made in an ℓ2 ball of 2.14, or of 4.

{judges}

## Claims

*Held* and *did not hold*: the interval leaves zero, or the number that the claim names, on one side. *Cannot tell*: it
does not, or there are too few models here for the claim. A dash: the claim says nothing about this case. Intervals are
95 %: Wilson's of shares, Tango's of their differences on the same images, Bonett and Wright's of rank correlations,
Student's t of means over images, networks and directions. A claim is tried on several models or in several ways:

{summary}

{claims}

Eq. 5, on which the proof of C1 rests, has its middle term on the wrong side as printed; [the corrected
one](jacobian.md#what-differs-from-the-paper) agrees with automatic differentiation. G5 is about many architectures that
were trained adversarially, of which there are two here. For C4, `robust-vit` and `standard-vit` have three blocks, so
the median of the others is that of a single block; of F, the ResNets' two blocks that change the shape are left out.
What is said of a ViT and a CNN is said of these two.
"""


def write_page(sizes: Sizes) -> None:
    results = read(sizes.results, sizes.networks)
    rows = claim_rows(results)
    shown = {field.name: getattr(sizes, field.name) for field in dataclasses.fields(sizes)}
    epochs = {f"{kind}_epochs": count for kind, count in sizes.epochs}
    parts = {
        "count": len(sizes.networks),
        "models": models_table(results),
        "networks": networks_table(results),
        "judges": judges_table(results),
        "summary": summary_table(rows),
        "claims": claims_table(rows),
    }
    sizes.docs.mkdir(parents=True, exist_ok=True)
    (sizes.docs / "understanding.md").write_text(TEMPLATE.format(**(shown | epochs | parts)))
    draw(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="train and measure nothing: draw what is kept")
    parser.add_argument("--small", action="store_true", help="a few images and steps, to see that it works")
    parser.add_argument("job", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = SMALL if options.small else Sizes()
    if options.job:
        run(*options.job, sizes)
        return
    if not options.page:
        run_jobs(sizes)
    write_page(sizes)


if __name__ == "__main__":
    main()

"""RSPC in small: one ViT trained in five ways with three seeds, and which claims of the paper hold on it.

    python -m scripts.rspc_study                       # train, measure, write docs/rspc.md; run it again to resume
    python -m scripts.rspc_study --arms rspc-strong    # other ways of training than those four
    python -m scripts.rspc_study --page                # only write the page

Two processes of one thread train and measure run by run in `runs/rspc-study/`; what the page needs of a run is kept in
`benchmarks/results/rspc_study/`. CIFAR-10 must be there (`bastion data get cifar10`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from scripts.study import PROCESSES, both, in_processes, minus, points, students_t, table, verdict, with_label

from bastion import storage
from bastion.measuring.facts import read_measurements
from bastion.measuring.intervals import Estimate
from bastion.recipe import load_recipe
from bastion.run import open_run

matplotlib.use("Agg")
ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs" / "rspc.md", ROOT / "docs" / "rspc.png"
RUNS, RESULTS = Path("runs") / "rspc-study", ROOT / "benchmarks" / "results" / "rspc_study"
SEEDS = (0, 1, 2)
RECIPE = "tiny/rspc"
COMMON = ("data=cifar10", "train_limit=10000", "schedule.epochs=8", "validate.limit=500")
STANDARD, OCCLUDED, RANDOM, LEARNED, STRONG = "standard", "ce-occluded", "random-strong", "rspc", "rspc-strong"
CLIMBS_CE, DROPS, TRADES = "rspc-strong-climbs-ce", "rspc-strong-zero", ("trades-1", "trades-2", "trades-3")
RVT, RVT_RSPC = "rvt", "rvt-rspc"


class Arm(NamedTuple):
    """A way of training."""

    label: str
    changes: list[str]
    minutes: float  # of one core, with measuring; of those that were never run, from what a step of them takes


def trades(steps: int) -> Arm:
    """As in the recipes of Fig. 7."""
    attack = f"{{name: pgd, steps: {steps}, rel_step: {1.5 / steps:g}, loss: kl, keep: last}}"
    threat = "{norm: linf, eps: 1/255}"
    objective = f"objective={{name: trades, label_smoothing: 0.1, beta: 6, threat: {threat}, attack: {attack}}}"
    return Arm(f"TRADES, K = {steps}", [objective], 17 + 3 * steps)


NORMAL = "objective={name: standard, label_smoothing: 0.1}"
ON_OCCLUDED = ["objective.weight=5e-3", "objective.minimize=cross-entropy", "objective.patches=random"]
ARMS = {
    STANDARD: Arm("standard training", [NORMAL], 10),
    OCCLUDED: Arm("CE, random patches", ON_OCCLUDED, 15),
    RANDOM: Arm("random patches, λ = 1", ["objective.weight=1", "objective.patches=random"], 16),
    LEARNED: Arm("RSPC, λ = 0.005", ["objective.weight=5e-3"], 16),
    STRONG: Arm("RSPC, λ = 1", ["objective.weight=1"], 16),
    CLIMBS_CE: Arm("C climbs CE, λ = 1", ["objective.weight=1", "objective.maximize=cross-entropy"], 20),
    DROPS: Arm("black patches, λ = 1", ["objective.weight=1", "objective.fill=zero"], 16),
    **{name: trades(steps) for steps, name in enumerate(TRADES, 1)},
    RVT: Arm("RVT, standard training", ["model=tiny/rvt", NORMAL], 23),
    RVT_RSPC: Arm("RVT, RSPC, λ = 1", ["model=tiny/rvt", "objective.weight=1"], 34),
}
COMPARED = (STANDARD, OCCLUDED, RANDOM, LEARNED, STRONG)  # in the tables; the others are for single claims
DEFAULT = (LEARNED, STANDARD, RANDOM, OCCLUDED)  # the first one learns the masks of the others
PATIENCE = 3600  # seconds that a run waits for the masks of another
STUDY: dict[str, Any] = {
    "probes": {
        "clean": "accuracy",
        "occlusion": {"name": "occlusion", "masks": 50, "size": 4},
        "confidence": {"name": "patch-confidence", "size": 4},
        "attention": {"name": "attention-stability", "size": 4},
        "pgd": {
            "name": "adversarial",
            "threat": {"norm": "linf", "eps": "1/255"},
            "attack": {"name": "pgd", "steps": 20},
        },
    },
}
PATCH_FOOL: dict[str, Any] = {
    "probes": {"patch-fool": {"name": "adversarial", "threat": {"norm": "linf", "eps": 1}, "attack": "patch-fool"}}
}
IMAGES = {"study": 1000, "corruptions": 500, "patch-fool": 100, "learned": 500}


def folder(arm: str, seed: int) -> Path:
    return RUNS / f"{arm}-{seed}"


def result(arm: str, seed: int) -> Path:
    return RESULTS / f"{arm}-{seed}.json"


def work(arm: str, seed: int) -> None:
    """Train one run, measure it and keep its numbers; what is there already is not done again."""
    import torch

    from bastion.measuring.runner import measure
    from bastion.training.trainer import train

    torch.set_num_threads(1)
    home = folder(arm, seed)
    train(RECIPE, changes=changes(arm, seed), folder=home, resume=(home / "recipe.yaml").is_file())
    if is_measured(arm, seed):  # before; it was trained again for its masks
        return
    measure(home, "cifar10", STUDY, limit=IMAGES["study"])
    measure(home, "cifar10", "corruptions", limit=IMAGES["corruptions"])
    measure(home, "cifar10", PATCH_FOOL, limit=IMAGES["patch-fool"])
    source = folder(arm if arm == STRONG else LEARNED, seed)  # of the learned masks
    wait_for(source)
    masks = {"size": 4, "corruption_model": str(source)}
    learned = {"learned": {"name": "occlusion", **masks}, "moved": {"name": "attention-stability", **masks}}
    measure(home, "cifar10", {"probes": learned}, limit=IMAGES["learned"])
    storage.write_json(result(arm, seed), numbers_of(arm, seed)._asdict() | {"made": made(arm, seed)})


def changes(arm: str, seed: int) -> tuple[str, ...]:
    return *COMMON, *ARMS[arm].changes, f"seed={seed}"


def made(arm: str, seed: int) -> dict[str, Any]:
    """What a result depends on, besides the code: the recipe, what was measured, and on how many images."""
    suites = {"study": STUDY, "corruptions": "corruptions", "patch-fool": PATCH_FOOL}
    return {"recipe": load_recipe(RECIPE, changes(arm, seed)).hash(), "suites": suites, "images": IMAGES}


def is_measured(arm: str, seed: int) -> bool:
    """Whether there is a result, and of the recipe, suites and images as they are now."""
    path = result(arm, seed)
    return path.is_file() and storage.read_json(path).get("made") == made(arm, seed)


def wait_for(source: Path) -> None:
    """Until the other process has trained it to the end."""
    limit = time.monotonic() + PATIENCE
    while not is_trained(source):
        if time.monotonic() > limit:
            raise SystemExit(f"{source} is not trained; see its log")
        time.sleep(1)


def is_trained(home: Path) -> bool:
    card = home / "model" / "card.json"
    if not card.is_file():
        return False
    recipe = open_run(home).recipe()
    assert recipe is not None
    return bool(storage.read_json(card)["about"]["epoch"] == recipe["schedule"]["epochs"])


class Measured(NamedTuple):
    """Of one run: what is compared between arms, each as a share or a similarity."""

    values: dict[str, float]
    by_mask: list[float]  # accuracy under each of the masks


def numbers_of(arm: str, seed: int) -> Measured:
    facts = read_measurements(open_run(folder(arm, seed)))
    study, phases = with_label(facts, "occlusion"), with_label(facts, "corrupted type=fog severity=1")
    columns, by_mask = study.columns, study.columns["occlusion/right_by_mask"].mean(0)
    learned = with_label(facts, "learned")
    same = slice(learned.n)  # both begin with the first image
    corruptions = phases.accuracies()
    similarity = columns["attention/similarity"]
    values = {
        "clean": study.correct("clean").mean(),
        "corruptions": corruptions["mean corruption accuracy"].value,
        "corruptions without noise": corruptions["without noise"].value,
        "occluded, random masks": columns["occlusion/share_right"].mean(),
        "spread over masks": by_mask.std(ddof=1),
        "occluded, random masks, same images": columns["occlusion/share_right"][same].mean(),
        "occluded, learned masks": learned.correct("learned").mean(),
        "attention similarity": similarity.mean(),
        "attention similarity, same images": similarity[same].mean(),
        "attention similarity, learned masks": learned.columns["moved/similarity"].mean(),
        "attention similarity, lowest 5 %": np.quantile(similarity, 0.05),
        "PGD-20 at 1/255": study.correct("pgd").mean(),
        "Patch-Fool": with_label(facts, "patch-fool").correct("patch-fool").mean(),
        **{f"confidence {name}": columns[f"confidence/{name}_confidence"].mean() for name in CONFIDENCES},
    }
    clean = values["confidence clean"]
    values |= {f"drop {name}": clean - values[f"confidence {name}"] for name in CONFIDENCES[1:]}
    return Measured({name: float(value) for name, value in values.items()}, by_mask.tolist())


CONFIDENCES = ("clean", "adversarial", "noisy", "occluded")
NOT_RUN = "not run"

Results = dict[str, list[Measured]]


def difference(results: Results, arm: str, other: str, name: str) -> Estimate:
    """Of one number between two arms, paired by seed."""
    pairs = zip(results[arm], results[other], strict=True)
    return students_t([one.values[name] - two.values[name] for one, two in pairs])


def within(results: Results, arm: str, one: str, two: str, share: float = 1) -> Estimate:
    """Of two numbers of the same models, or of one and a share of the other."""
    return students_t([run.values[one] - share * run.values[two] for run in results[arm]])


SHOWN = {
    "clean": "clean",
    "corruptions": "corruptions",
    "corruptions without noise": "corruptions without noise",
    "occluded, random masks": "occluded, random masks",
    "spread over masks": "spread over masks",
    "occluded, random masks, same images": "occluded, random masks, first 500 images",
    "occluded, learned masks": "occluded, masks of C, first 500 images",
    "attention similarity": "attention similarity",
    "attention similarity, lowest 5 %": "attention similarity, lowest 5 %",
    "attention similarity, same images": "attention similarity, first 500 images",
    "attention similarity, learned masks": "attention similarity, masks of C, first 500 images",
    "PGD-20 at 1/255": "PGD-20 at 1/255",
    "Patch-Fool": "Patch-Fool",
}


def numbers(results: Results) -> str:
    """A row for each number: the mean over seeds of standard training, and what each other arm adds."""
    others = [arm for arm in results if arm != STANDARD]
    rows = []
    for name, shown in SHOWN.items():
        base = np.mean([each.values[name] for each in results[STANDARD]])
        added = [points(difference(results, arm, STANDARD, name)) for arm in others]
        rows.append([shown, f"{100 * base:.1f}", *added])
    return table(["%", *(ARMS[arm].label for arm in results)], rows)


def confidences(results: Results) -> str:
    rows = []
    for arm, measured in results.items():
        cells = [
            f"{100 * np.mean([each.values[f'confidence {name}'] for each in measured]):.1f}" for name in CONFIDENCES
        ]
        rows.append([ARMS[arm].label, *cells])
    return table(["mean probability of the true class, %", "clean", "PGD-5", "Gaussian noise", "occluded"], rows)


# Claims that one arm has a higher accuracy under corruptions than another: words for the difference, and the two.
BETTER: list[tuple[Any, ...]] = [
    (
        "R5: learned patches better than random ones, those better than CE on occluded images",
        ("learned less random", STRONG, RANDOM),
        ("random less CE", RANDOM, OCCLUDED),
    ),
    (
        "R6: C that climbs alignment, and noise as the filling, are best",
        ("alignment less CE", STRONG, CLIMBS_CE),
        ("noise less black", STRONG, DROPS),
    ),
    (
        "R7: better than TRADES at ε = 1/255, in less time ([measured](training.md#rspc))",
        *((f"RSPC less {ARMS[other].label}", STRONG, other) for other in TRADES),
    ),
    ("R8: other architectures gain too", ("RVT, RSPC less standard", RVT_RSPC, RVT)),
]


def better(results: Results, claim: str, *pairs: tuple[str, str, str]) -> tuple[str, ...]:
    """The row of such a claim; how to run the arms that are not there."""
    missing = dict.fromkeys(arm for _, *two in pairs for arm in two if arm not in results)
    if missing:
        return claim, "corruptions", f"`python -m scripts.rspc_study --arms {' '.join(missing)}`", NOT_RUN
    found = [difference(results, one, two, "corruptions") for _, one, two in pairs]
    text = ", ".join(f"{words} {points(each)}" for (words, *_), each in zip(pairs, found, strict=True))
    return claim, "corruptions", text, both(*map(verdict, found))


def claims(results: Results) -> str:
    """A row for each claim that this scale can speak to."""
    rows: list[tuple[str, ...]] = []

    def of(arm: str, name: str, other: str = STANDARD) -> Estimate:
        return difference(results, arm, other, name)

    def add(*cells: str) -> None:
        rows.append(cells)

    drops = {name: f"drop {name}" for name in CONFIDENCES[1:]}
    near = [
        within(results, STANDARD, drops["occluded"], drops["adversarial"], 0.5),
        minus(within(results, STANDARD, drops["noisy"], drops["occluded"], 0.5)),
    ]
    means = {name: np.mean([100 * run.values[drop] for run in results[STANDARD]]) for name, drop in drops.items()}
    add(
        "R1: occlusion is like adversarial patches, added noise is not: confidence falls by at least half as much; by "
        "less than half of that",
        ARMS[STANDARD].label,
        f"PGD-5 −{means['adversarial']:.2f}, occlusion −{means['occluded']:.2f}, noise −{means['noisy']:.2f}",
        both(*map(verdict, near)),
    )
    for arm in (each for each in (LEARNED, STRONG) if each in results):
        label = ARMS[arm].label
        stable = [of(arm, name) for name in ("attention similarity", "attention similarity, lowest 5 %")]
        found = f"{points(stable[0])}; lowest 5 % {points(stable[1])}"
        add("R2: attention is steadier", label, found, both(*map(verdict, stable)))
        gain, clean = of(arm, "corruptions"), of(arm, "clean")
        add(
            "R3: better under corruptions, clean accuracy no more than 0.5 points lower",
            label,
            f"{points(gain)}; clean {points(clean)}",
            both(verdict(gain), verdict(clean, -0.005)),
        )
        gain = of(arm, "corruptions without noise")
        add("R4: also without the noise types", label, points(gain), verdict(gain))
        spread, mean = minus(of(arm, "spread over masks")), of(arm, "occluded, random masks")
        add(
            "R9: over random masks, accuracy is higher and less spread",
            label,
            f"{points(mean)}; spread {points(minus(spread))}",
            both(verdict(mean), verdict(spread)),
        )
        attacks = [of(arm, "PGD-20 at 1/255"), of(arm, "Patch-Fool")]
        found = "; ".join(map(points, attacks))
        add("R10: helps against PGD and Patch-Fool", label, found, both(*map(verdict, attacks)))
    rows += [better(results, claim, *pairs) for claim, *pairs in BETTER[:1]]
    for arm in (each for each in (STANDARD, LEARNED, STRONG) if each in results):
        lost = [
            within(results, arm, "occluded, random masks, same images", "occluded, learned masks"),
            within(results, arm, "attention similarity, same images", "attention similarity, learned masks"),
        ]
        found = f"accuracy {points(minus(lost[0]))}, similarity of attention {points(minus(lost[1]))}"
        add("R5, masks: learned ones do more harm than random ones", ARMS[arm].label, found, both(*map(verdict, lost)))
    rows += [better(results, claim, *pairs) for claim, *pairs in BETTER[1:]]
    return table(["claim", "arms", "found", "verdict"], rows)


def picture(results: Results) -> None:
    """Accuracy over the masks, one box for each run (Fig. 2)."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8, 3.4), layout="constrained")
    axes = drawn.subplots()
    for row, (arm, measured) in enumerate(results.items()):
        places = [row * (len(SEEDS) + 1) + number for number in range(len(measured))]
        axes.boxplot([100 * np.array(each.by_mask) for each in measured], positions=places, widths=0.7, showfliers=True)
        axes.text(
            np.mean(places),
            0.98,
            ARMS[arm].label,
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            fontsize=8,
        )
    axes.set_xticks([])
    axes.set_ylabel("accuracy under one mask an image (%)")
    axes.margins(y=0.25)
    axes.grid(axis="y", alpha=0.3)
    drawn.savefig(PICTURE, dpi=110)


TEMPLATE = """# RSPC in small

RSPC (Guo et al. 2023) trains a Vision Transformer to keep its features when the patches that matter most are occluded
by noise; a small corruption model learns which those are. [Training](training.md) has the objective,
[suites](suites.md) the probes. This page asks which of the paper's claims hold on a network that two cores train in
minutes.

```text
bastion data get cifar10
python -m scripts.rspc_study                     # about {minutes:.0f} minutes on two cores; resumable; writes this page
python -m scripts.rspc_study --arms rspc-strong  # the last column, about {last:.0f} minutes more
```

One network, `tiny/vit` (64 tokens, 0.5 M parameters), on 10,000 images of CIFAR-10 for 8 epochs, in {ways} ways, three
seeds each: the recipe `tiny/rspc` and changes to its objective. λ = 0.005 is the paper's; it is so
small here that learned and random patches gave the same clean and corruption accuracy to within 0.1 points in two
seeds (`benchmarks/results/rspc_study/random-*.json`), so both are trained with λ = 1. Measured on the first test
images: 1,000 for accuracy, occlusion (50 random masks an image, 7 of 64 patches), attention and PGD, 500 for each of
15 corruptions at 5 severities (`frost_proc` for `frost`) and for learned masks, 100 for Patch-Fool.

The runs are from several states of the code, from before and after changes that were not meant to change them. Each
stored result names the recipe, suites and images that it is of, by which the command tells what to do again.

## Numbers

Standard training, mean over three seeds; then what each other way adds, in points, paired by seed, with the 95 %
interval of Student's t over the seeds. Three seeds make wide intervals.

{numbers}

C is the corruption model of RSPC with λ = 0.005 of the same seed, and in the column λ = 1 that run's own, so these
rows do not compare that column with the others under the same masks.

![Accuracy under each of 50 masks, one box for each run](rspc.png)

Each box is one run: accuracy under each of 50 masks.

What one tenth of the patches does to the probability of the true class (the paper's Fig. 1), the same random patches
for all three:

{confidence}

## Claims

*Held* and *did not hold*: the interval leaves zero, or the bound that the claim names, on one side. *Cannot tell*: it
does not. A claim in several parts holds if all of them do. What was *not run* has the command that would.

{claims}

"""


def minutes(arms: Iterable[str]) -> float:
    """Of all seeds, on two cores."""
    return len(SEEDS) * sum(ARMS[arm].minutes for arm in arms) / PROCESSES


def write_page() -> None:
    for path in (result(arm, seed) for arm in ARMS for seed in SEEDS if not is_measured(arm, seed)):
        if path.is_file():
            raise SystemExit(f"{path}: of another recipe, suite or number of images; run its arm again, or remove it")
    complete = [arm for arm in ARMS if all(is_measured(arm, seed) for seed in SEEDS)]
    results = {arm: [stored(arm, seed) for seed in SEEDS] for arm in complete}
    compared = {arm: results[arm] for arm in COMPARED if arm in results}
    parts = {
        "ways": str(len(compared)),
        "minutes": minutes(DEFAULT),
        "last": minutes([STRONG]),
        "numbers": numbers(compared),
        "confidence": confidences(compared),
        "claims": claims(results),
    }
    PAGE.write_text(TEMPLATE.format(**parts))
    picture(compared)


def stored(arm: str, seed: int) -> Measured:
    content = storage.read_json(result(arm, seed))
    return Measured(content["values"], content["by_mask"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=DEFAULT, metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--page", action="store_true", help="train and measure nothing")
    parser.add_argument("job", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        arm, seed = options.job
        work(arm, int(seed))
        return
    if not options.page:
        jobs = [(arm, seed) for seed in SEEDS for arm in options.arms]
        todo = [job for job in jobs if not is_measured(*job)]
        # The masks of the other runs of a seed are those of its LEARNED run, whose folder may be gone.
        masks = [(LEARNED, seed) for seed in sorted({seed for arm, seed in todo if arm != STRONG})]
        todo = [job for job in masks if job in todo or not is_trained(folder(*job))] + [
            job for job in todo if job not in masks
        ]
        print(f"about {sum(ARMS[arm].minutes for arm, _ in todo) / PROCESSES:.0f} minutes on two cores", flush=True)
        in_processes("scripts.rspc_study", [(arm, str(seed)) for arm, seed in todo], RUNS / "logs")
    write_page()


if __name__ == "__main__":
    main()

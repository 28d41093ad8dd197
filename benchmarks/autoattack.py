"""bastion's AutoAttack beside the reference implementation: is it as strong, and how much faster?

    python -m benchmarks.autoattack                      # measure what is not stored yet, then print the tables
    python -m benchmarks.autoattack --n 100 --norms linf --models zoo/cifar10-linf-vit
    python -m benchmarks.autoattack --whole --norms linf --n 256    # `standard` as a user runs it, on all cores
    python -m benchmarks.autoattack --whole --norms linf --n 128 --models pyautoattack/resnet18
    python -m benchmarks.autoattack --stored --write     # put the tables into docs/attacks.md
    python -m benchmarks.autoattack --beside torchattacks --norms linf --n 100   # pip install --no-deps torchattacks
    python -m benchmarks.autoattack --memory             # peak memory of both sides, each in a process of its own
    python -m benchmarks.autoattack --seeds 3 --norms l1 --components apgd-t   # does the reference agree with itself?
    python -m benchmarks.autoattack --beside same-draws --norms l1 --components square   # both with the same luck

Component by component, both sides get the same model, the same images in the same order and one thread, in one process
and one after the other; a component attacks all images that are classified right, not only what others left over. The
whole of `standard` is timed by the clock, with as many threads on each side: the reference in one process, bastion in
worker processes of one thread. Results are stored in `benchmarks/results/`, so that a run that is stopped goes on where
it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pyautoattack.autoattack as reference
import torch
from torch import Tensor, nn

from bastion import journal, storage
from bastion.attacks import Threat
from bastion.attacks.ensemble import AutoAttack
from bastion.attacks.judge import judge
from bastion.data import datasets
from bastion.measuring.runner import measure
from bastion.models.load import load
from bastion.suite import Suite
from bastion.types import Batch
from benchmarks.draws import NORMS, SameDraws

RESULTS = Path(__file__).parent / "results" / "autoattack"
DOCS = Path(__file__).parent.parent / "docs" / "attacks.md"
MODELS = ("zoo/cifar10-linf-resnet", "zoo/cifar10-linf-vit")
THREATS = {"linf": Threat("linf", 8 / 255), "l2": Threat("l2", 0.5), "l1": Threat("l1", 12.0)}
COMPONENTS = ("apgd-ce", "apgd-t", "fab-t", "square")
STANDARD = "standard"
STRANGER = "pyautoattack/resnet18"
# What is beside bastion, and how its results are called.
OTHERS = {"reference": "", "torchattacks": "torchattacks-", "same-draws": "same-draws-"}
CHUNK = 100
BLOCK = 256  # of the whole: what survives of it shares batches, which larger ones fill better
COSTS = ("seconds", "forwards", "backwards")


@dataclass
class Side:
    """What one implementation did with a chunk."""

    robust: list[bool]  # example by example
    seconds: float  # of the processor for a component, where waiting for others does not count; of the clock for all
    forwards: int  # images
    backwards: int


@dataclass
class Result:
    clean: list[bool]
    bastion: Side
    reference: Side


class Counted(nn.Module):
    """Counts the images that go through a model forwards and backwards."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.forwards, self.backwards = model, 0, 0
        self.training = model.training  # torchattacks puts all of the model back into this mode

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        self.forwards += len(x)
        if logits.requires_grad:
            logits.register_hook(self._backward)
        return logits

    def _backward(self, gradient: Tensor) -> None:
        self.backwards += len(gradient)


def by_bastion(model: nn.Module, batch: Batch, threat: Threat, component: str) -> Side:
    attack = dict(AutoAttack().named_members(threat.norm))[component]
    began = time.process_time()
    with journal.opened() as notes:
        verdict = judge(model, batch, attack, threat, seed=0)
    seconds = time.process_time() - began
    judged = 2 * len(batch.x)
    forwards, backwards = sum(notes.forwards.values()) + judged, sum(notes.backwards.values())
    return Side((verdict.clean & ~verdict.fooled).tolist(), seconds, forwards, backwards)


def by_reference(
    model: nn.Module, batch: Batch, threat: Threat, component: str, seed: int = 0, *, same_draws: bool = False
) -> Side:
    """`same_draws`: its Square gets the random numbers that bastion draws for example 0."""
    counted = Counted(model)
    adversary = reference.AutoAttack(counted, norm=NORMS[threat.norm], eps=threat.eps, seed=seed)
    if component != STANDARD:
        adversary.attacks_to_run = [component]
    if same_draws:
        adversary.square = SameDraws.of(counted, threat)
    adversary.verbose = False
    clock = time.perf_counter if component == STANDARD else time.process_time
    began = clock()
    x = adversary.run_standard_evaluation(batch.x, batch.y, batch_size=250)[0]
    seconds = clock() - began
    with torch.no_grad():
        right = model(x).argmax(1) == batch.y
    return Side(right.tolist(), seconds, counted.forwards, counted.backwards)


def whole_by_bastion(model: nn.Module, threat: Threat, n: int, workers: int) -> Side:
    """As `bastion measure --batch-size 256` does it: worker processes, blocks that are stored when they are done."""
    probe = {"name": "adversarial", "threat": asdict(threat), "attack": "autoattack"}
    suite = Suite.model_validate({"probes": {"attack": probe}})
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        facts = measure(
            model, "cifar10", suite, limit=n, workers=workers, folder=folder, batch_size=min(BLOCK, n // workers)
        )
        seconds = time.perf_counter() - began
        forwards, backwards = (int(facts.columns[f"attack/{way}"].sum()) for way in ("forwards", "backwards"))
        return Side(facts.correct("attack").tolist(), seconds, forwards + 2 * n, backwards)


def without_checks() -> None:
    """The reference's sanity checks are left out: they are no part of its attacks, and cost it time."""
    for name in ("check_randomized", "check_dynamic", "check_n_classes", "check_square_sr"):
        setattr(reference.checks, name, lambda *_, **__: None)
    reference.checks.check_range_output = lambda *_, **__: 10


def load_model(name: str) -> nn.Module:
    """A model of bastion's, or the standard ResNet-18 for CIFAR-10 that comes with the reference."""
    if name != STRANGER:
        return load(name).eval()
    from pyautoattack.examples.resnet import ResNet18

    model: nn.Module = ResNet18()
    weights = Path(reference.__file__).parent / "examples" / "model_test.pt"
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return model.eval()


def by_torchattacks(model: nn.Module, batch: Batch, threat: Threat, component: str) -> Side:
    """The same component by torchattacks, which has linf and l2. Not every point it returns is inside the ball."""
    import torchattacks

    counted = Counted(model)
    common = {"norm": NORMS[threat.norm], "eps": threat.eps, "seed": 0}
    attack = {
        "apgd-ce": lambda: torchattacks.APGD(counted, steps=100, loss="ce", **common),
        "apgd-t": lambda: torchattacks.APGDT(counted, steps=100, **common),
        "fab-t": lambda: torchattacks.FAB(counted, steps=100, multi_targeted=True, **common),
        "square": lambda: torchattacks.Square(counted, n_queries=5000, **common),
    }[component]()
    began = time.process_time()
    x = attack(batch.x, batch.y)
    seconds = time.process_time() - began
    with torch.no_grad():
        right = (model(x).argmax(1) == batch.y) | ~threat.contains(batch.x, x)
        right &= model(batch.x).argmax(1) == batch.y
    return Side(right.tolist(), seconds, counted.forwards, counted.backwards)


def peak_memory(model_name: str, norm: str, side: str) -> float:
    """MiB that APGD on 250 images adds to what the process held before."""
    model, threat = load_model(model_name), THREATS[norm]
    batch = datasets.build("cifar10").test.batch(range(250))
    with torch.no_grad():
        model(batch.x[:8])
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten (Linux)
    before = _kibibytes("VmRSS")
    {"bastion": by_bastion, "reference": by_reference}[side](model, batch, threat, "apgd-ce")
    return (_kibibytes("VmHWM") - before) / 1024


def _kibibytes(name: str) -> int:
    """Of this process, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def compare_memory(models: list[str], norms: list[str]) -> None:
    for model in models:
        for norm in norms:
            command = [sys.executable, "-m", "benchmarks.autoattack", "--models", model, "--norms", norm, "--peak"]
            peaks = [
                float(subprocess.run([*command, side], check=True, capture_output=True, text=True).stdout)
                for side in ("bastion", "reference")
            ]
            print(f"{model} {norm}: bastion {peaks[0]:.0f} MiB, reference {peaks[1]:.0f} MiB", flush=True)


def compare_seeds(models: list[str], norms: list[str], components: list[str], seeds: int) -> None:
    """How far the reference agrees with itself when only its seed changes: nobody can agree with it better."""
    batch = datasets.build("cifar10").test.batch(range(CHUNK))
    for name, norm, component in product(models, norms, components):
        model = load_model(name)
        runs = [by_reference(model, batch, THREATS[norm], component, seed).robust for seed in range(seeds)]
        agreed = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in combinations(runs, 2)]
        print(f"{name} {norm} {component}: robust {[sum(run) for run in runs]}, agree {agreed} of {CHUNK}", flush=True)


def path_of(model: str, norm: str, component: str, start: int) -> Path:
    return RESULTS / model.removeprefix("zoo/").replace("/", "-") / norm / f"{component}-{start:05d}.json"


def compare(model_name: str, norm: str, component: str, start: int, other: str) -> None:
    path = path_of(model_name, norm, OTHERS[other] + component, start)
    if path.is_file():
        return
    model = load_model(model_name)
    batch = datasets.build("cifar10").test.batch(range(start, start + CHUNK))
    with torch.no_grad():
        clean = (model(batch.x).argmax(1) == batch.y).tolist()
    if other == "same-draws":
        batch = batch._replace(index=torch.zeros_like(batch.index))
    ours = by_bastion(model, batch, THREATS[norm], component)
    if other == "torchattacks":
        theirs = by_torchattacks(model, batch, THREATS[norm], component)
    else:
        theirs = by_reference(model, batch, THREATS[norm], component, same_draws=other == "same-draws")
    _store(path, Result(clean, ours, theirs))


def compare_whole(model_name: str, norm: str, n: int) -> None:
    path = path_of(model_name, norm, STANDARD, n)
    if path.is_file():
        return
    model, batch, threads = load_model(model_name), datasets.build("cifar10").test.batch(range(n)), os.cpu_count() or 1
    with torch.no_grad():
        clean = (model(batch.x).argmax(1) == batch.y).tolist()
    ours = whole_by_bastion(model, THREATS[norm], n, threads)
    torch.set_num_threads(threads)
    theirs = by_reference(model, batch, THREATS[norm], STANDARD)
    torch.set_num_threads(1)
    _store(path, Result(clean, ours, theirs))


def _store(path: Path, result: Result) -> None:
    storage.write_json(path, asdict(result))
    print(f"{path.relative_to(RESULTS).with_suffix('')}: {_line([result])}", flush=True)


def read(model: str, norm: str, component: str, starts: Iterable[int]) -> list[Result]:
    paths = [path_of(model, norm, component, start) for start in starts]
    stored = [json.loads(path.read_text()) for path in paths if path.is_file()]
    return [Result(each["clean"], Side(**each["bastion"]), Side(**each["reference"])) for each in stored]


def _line(results: list[Result]) -> str:
    n = sum(len(result.clean) for result in results)

    def total(side: str, what: str) -> Any:
        return sum(getattr(getattr(result, side), what) for result in results)

    def robust(side: str) -> float:
        return 100 * sum(sum(getattr(result, side).robust) for result in results) / n

    same = sum(a == b for r in results for a, b in zip(r.bastion.robust, r.reference.robust, strict=True))
    passes = [f"{total(side, w) / 1000:.0f}k" for side in ("bastion", "reference") for w in ("forwards", "backwards")]
    ratio = total("reference", "seconds") / total("bastion", "seconds")
    cells = [
        str(n),
        f"{robust('bastion'):.1f}",
        f"{robust('reference'):.1f}",
        f"{100 * same / n:.1f}",
        f"{passes[0]} / {passes[1]}",
        f"{passes[2]} / {passes[3]}",
        f"{ratio:.2f}×",
    ]
    return " | ".join(cells)


def together(components: list[list[Result]]) -> list[Result]:
    """An image is robust against all if it is against each; chunks that every component has."""
    joined = []
    for results in zip(*components, strict=False):
        sides = [
            Side(
                [all(flags) for flags in zip(*(getattr(result, name).robust for result in results), strict=True)],
                *(sum(getattr(getattr(result, name), what) for result in results) for what in COSTS),
            )
            for name in ("bastion", "reference")
        ]
        joined.append(Result(results[0].clean, *sides))
    return joined


def tables(models: list[str], norms: list[str], n: int) -> Iterator[str]:
    """Markdown."""
    for (other, prefix), model in product(OTHERS.items(), models):
        rows = []
        for norm in norms:
            components = [read(model, norm, prefix + component, range(0, n, CHUNK)) for component in COMPONENTS]
            for component, results in zip((*COMPONENTS, "all four"), (*components, together(components)), strict=True):
                rows += [f"| {norm} | {component} | {_line(results)} |"] if results else []
        yield from _table(f"`{model}`, component by component", "norm | attack", other, rows)
    rows = []
    for path in sorted(RESULTS.glob(f"*/*/{STANDARD}-*.json")):
        model, norm = path.parts[-3:-1]
        rows += [f"| {model} | {norm} | {_line(read(model, norm, STANDARD, [int(path.stem.split('-')[1])]))} |"]
    yield from _table("Whole `standard`, by the clock", "model | norm", "reference", rows)


def _table(title: str, what: str, other: str, rows: list[str]) -> list[str]:
    head = f"| {what} | n | bastion % | {other} % | agree % | passes (fwd / bwd) | {other}'s | speed |"
    return [f"\n{title}\n", head, "|---" * 9 + "|", *rows] if rows else []


def write_docs(lines: list[str]) -> None:
    begin, end = "<!-- autoattack table -->", "<!-- end -->"
    text = DOCS.read_text()
    head, rest = text.split(begin)
    storage.write_text(DOCS, head + begin + "\n".join(lines) + "\n\n" + end + rest.split(end, 1)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--norms", nargs="+", default=list(THREATS), choices=list(THREATS))
    parser.add_argument("--components", nargs="+", default=list(COMPONENTS), choices=COMPONENTS)
    parser.add_argument("--n", type=int, default=500, help=f"images, in chunks of {CHUNK}")
    parser.add_argument("--whole", action="store_true", help="time all of `standard` on all cores instead")
    parser.add_argument("--memory", action="store_true", help="compare peak memory instead")
    parser.add_argument("--peak", choices=("bastion", "reference"), help=argparse.SUPPRESS)
    parser.add_argument(
        "--beside", default="reference", choices=list(OTHERS), help="torchattacks has linf and l2, same-draws Square"
    )
    parser.add_argument("--seeds", type=int, help="compare the reference with itself under so many seeds instead")
    parser.add_argument("--stored", action="store_true", help="measure nothing, print what is stored")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/attacks.md")
    chosen = parser.parse_args()
    if chosen.beside == "torchattacks" and "l1" in chosen.norms:
        parser.error("torchattacks has no l1; give --norms linf l2")
    if chosen.beside == "same-draws" and chosen.components != ["square"]:
        parser.error("same-draws is for Square; give --components square")
    torch.set_num_threads(1)
    without_checks()
    if chosen.peak:
        print(peak_memory(chosen.models[0], chosen.norms[0], chosen.peak))
        return
    if chosen.memory:
        compare_memory(chosen.models, chosen.norms)
        return
    if chosen.seeds:
        compare_seeds(chosen.models, chosen.norms, chosen.components, chosen.seeds)
        return
    for model, norm in [] if chosen.stored or not chosen.whole else product(chosen.models, chosen.norms):
        compare_whole(model, norm, chosen.n)
    for start in [] if chosen.stored or chosen.whole else range(0, chosen.n, CHUNK):
        for component, norm, model in product(chosen.components, chosen.norms, chosen.models):
            compare(model, norm, component, start, chosen.beside)
    lines = list(tables(chosen.models, chosen.norms, chosen.n))
    print("\n".join(lines))
    if chosen.write:
        write_docs(lines)


if __name__ == "__main__":
    main()

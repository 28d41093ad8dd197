"""bastion's AutoAttack beside the reference implementation: is it as strong, and how much faster?

    python -m benchmarks.autoattack                      # measure what is not stored yet, then print the tables
    python -m benchmarks.autoattack --n 100 --norms linf --models zoo/cifar10-linf-vit
    python -m benchmarks.autoattack --write              # … and put the tables into docs/attacks.md
    python -m benchmarks.autoattack --components standard --norms linf --models pyautoattack/resnet18 --n 100
    python -m benchmarks.autoattack --memory             # peak memory of both sides, each in a process of its own

Both sides get the same model, the same images in the same order and one thread, in one process and one after the
other. Results are stored in `benchmarks/results/`, a file for every chunk of images, so that a run that is
stopped goes on where it was. A component attacks all images that are classified right, not only what others left over.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyautoattack.autoattack as reference
import torch
from torch import Tensor, nn

from bastion import storage
from bastion.attacks import Threat, journal
from bastion.attacks.ensemble import AutoAttack
from bastion.attacks.judge import judge
from bastion.data import datasets
from bastion.models.load import load
from bastion.types import Batch

RESULTS = Path(__file__).parent / "results" / "autoattack"
DOCS = Path(__file__).parent.parent / "docs" / "attacks.md"
MODELS = ("zoo/cifar10-linf-resnet", "zoo/cifar10-linf-vit")
THREATS = {"linf": Threat("linf", 8 / 255), "l2": Threat("l2", 0.5), "l1": Threat("l1", 12.0)}
COMPONENTS = ("apgd-ce", "apgd-t", "fab-t", "square")
STANDARD = "standard"
STRANGER = "pyautoattack/resnet18"
CHUNK = 100


@dataclass
class Side:
    """What one implementation did with a chunk."""

    robust: list[bool]  # example by example
    seconds: float  # of the processor, all threads; waiting for other processes does not count
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

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        self.forwards += len(x)
        if logits.requires_grad:
            logits.register_hook(self._backward)
        return logits

    def _backward(self, gradient: Tensor) -> None:
        self.backwards += len(gradient)


def by_bastion(model: nn.Module, batch: Batch, threat: Threat, component: str) -> Side:
    ensemble = AutoAttack().ensemble(threat.norm)
    attack = ensemble if component == STANDARD else ensemble.members[COMPONENTS.index(component)]
    began = time.process_time()
    with journal.opened() as notes:
        verdict = judge(model, batch, attack, threat, seed=0)
    seconds = time.process_time() - began
    judged = 2 * len(batch.x)
    forwards, backwards = sum(notes.forwards.values()) + judged, sum(notes.backwards.values())
    return Side((verdict.clean & ~verdict.fooled).tolist(), seconds, forwards, backwards)


def by_reference(model: nn.Module, batch: Batch, threat: Threat, component: str) -> Side:
    counted = Counted(model)
    norm = {"linf": "Linf", "l2": "L2", "l1": "L1"}[threat.norm]
    adversary = reference.AutoAttack(counted, norm=norm, eps=threat.eps, seed=0)
    if component != STANDARD:
        adversary.attacks_to_run = [component]
    adversary.verbose = False
    began = time.process_time()
    x = adversary.run_standard_evaluation(batch.x, batch.y, batch_size=250)[0]
    seconds = time.process_time() - began
    with torch.no_grad():
        right = model(x).argmax(1) == batch.y
    return Side(right.tolist(), seconds, counted.forwards, counted.backwards)


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
    model.load_state_dict(torch.load(weights, weights_only=True))
    return model.eval()


def torchattacks_seconds(model: nn.Module, batch: Batch, threat: Threat, component: str) -> float:
    """The same component by torchattacks, which has linf and l2; NaN where it does not run."""
    try:
        import torchattacks as ta
    except ImportError:
        return float("nan")
    norm, eps = {"linf": "Linf", "l2": "L2"}[threat.norm], threat.eps
    attack = {
        "apgd-ce": lambda: ta.APGD(model, norm=norm, eps=eps, steps=100, loss="ce"),
        "apgd-t": lambda: ta.APGDT(model, norm=norm, eps=eps, steps=100),
        "fab-t": lambda: ta.FAB(model, norm=norm, eps=eps, steps=100, multi_targeted=True),
        "square": lambda: ta.Square(model, norm=norm, eps=eps, n_queries=5000),
        STANDARD: lambda: ta.AutoAttack(model, norm=norm, eps=eps),
    }[component]()
    began = time.process_time()
    attack(batch.x, batch.y)
    return time.process_time() - began


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


def compare_torchattacks(models: list[str], norms: list[str], components: list[str]) -> None:
    """It does not say whom it fooled, so only time is compared."""
    for name in models:
        for norm in [norm for norm in norms if norm != "l1"]:
            for component in components:
                model, batch = load_model(name), datasets.build("cifar10").test.batch(range(CHUNK))
                ours = by_bastion(model, batch, THREATS[norm], component).seconds
                theirs = torchattacks_seconds(model, batch, THREATS[norm], component)
                print(f"{name} {norm} {component}: {theirs / ours:.2f}× the speed of torchattacks", flush=True)


def path_of(model: str, norm: str, component: str, start: int) -> Path:
    return RESULTS / model.removeprefix("zoo/").replace("/", "-") / norm / f"{component}-{start:05d}.json"


def measure(model_name: str, norm: str, component: str, start: int) -> None:
    path = path_of(model_name, norm, component, start)
    if path.is_file():
        return
    model = load_model(model_name)
    batch = datasets.build("cifar10").test.batch(range(start, start + CHUNK))
    with torch.no_grad():
        clean = (model(batch.x).argmax(1) == batch.y).tolist()
    ours = by_bastion(model, batch, THREATS[norm], component)
    theirs = by_reference(model, batch, THREATS[norm], component)
    result = Result(clean, ours, theirs)
    storage.write_json(path, asdict(result))
    print(f"{model_name} {norm} {component} {start}: {_line([result])}", flush=True)


def read(model: str, norm: str, component: str, n: int) -> list[Result]:
    paths = [path_of(model, norm, component, start) for start in range(0, n, CHUNK)]
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


def tables(models: list[str], norms: list[str], components: list[str], n: int) -> Iterator[str]:
    """Markdown."""
    for model in models:
        yield f"\n`{model}`\n"
        yield "| norm | attack | n | bastion % | reference % | agree % | passes (fwd / bwd) | reference's | speed |"
        yield "|---|---|---|---|---|---|---|---|---|"
        for norm in norms:
            for component in components:
                results = read(model, norm, component, n)
                if results:
                    yield f"| {norm} | {component} | {_line(results)} |"


def write_docs(lines: list[str]) -> None:
    begin, end = "<!-- autoattack table -->", "<!-- end -->"
    text = DOCS.read_text()
    head, rest = text.split(begin)
    storage.write_text(DOCS, head + begin + "\n".join(lines) + "\n\n" + end + rest.split(end, 1)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--norms", nargs="+", default=list(THREATS), choices=list(THREATS))
    parser.add_argument("--components", nargs="+", default=list(COMPONENTS), choices=[*COMPONENTS, STANDARD])
    parser.add_argument("--n", type=int, default=500, help=f"images, in chunks of {CHUNK}")
    parser.add_argument("--memory", action="store_true", help="compare peak memory instead")
    parser.add_argument("--peak", choices=("bastion", "reference"), help=argparse.SUPPRESS)
    parser.add_argument("--torchattacks", action="store_true", help="time torchattacks too, on the first 100 images")
    parser.add_argument("--stored", action="store_true", help="measure nothing, print what is stored")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/attacks.md")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    without_checks()
    if chosen.peak:
        print(peak_memory(chosen.models[0], chosen.norms[0], chosen.peak))
        return
    if chosen.memory:
        compare_memory(chosen.models, chosen.norms)
        return
    if chosen.torchattacks:
        compare_torchattacks(chosen.models, chosen.norms, chosen.components)
        return
    for start in [] if chosen.stored else range(0, chosen.n, CHUNK):
        for component in chosen.components:
            for norm in chosen.norms:
                for model in chosen.models:
                    measure(model, norm, component, start)
    lines = list(tables(chosen.models, chosen.norms, chosen.components, chosen.n))
    print("\n".join(lines))
    if chosen.write:
        write_docs(lines)


if __name__ == "__main__":
    main()

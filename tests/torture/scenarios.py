"""What is tortured: commands, and what of their files counts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bastion import storage
from bastion.run import Run
from tests.torture.commands import MODEL, Command, run, save_model

SUITE = """
probes:
  clean: accuracy
  pgd: {name: adversarial, threat: {norm: linf, eps: 8/255}, attack: {name: pgd, steps: 2}}
studies:
  norms: {name: weight-norms, images: 16}
aggregates:
  worst case: {worst: [clean, pgd]}
"""
TRAINING = (
    "data=colours",
    f"model={json.dumps(MODEL)}",
    "batch=8",
    "schedule.epochs=2",
    "schedule.warmup_epochs=0",
    "validate.limit=8",
    "validate.train=8",
    "log_every=1",
    "augment.padding=1",
    "checkpoint.minutes=1e-9",
)
ADVERSARIAL = (
    "objective={name: adversarial, threat: {norm: linf, eps: 8/255}, attack: {name: fgsm-rs, keep: last}}",
    "validate.attack={name: fgsm}",
    "ema=0.9",
)
BESIDE = ("objective={name: rspc, corruption_lr: 0.1}", "validate.when=end", "checkpoint.keep=1")
VOLATILE = {"seconds", "images_per_s", "stall", "checksum"}  # of a log line


@dataclass(frozen=True)
class Scenario:
    """`command` works below a folder; `counts` says what of it must be equal, by name."""

    name: str
    command: Callable[[Path], Command]
    counts: Callable[[Path], dict[str, str]]
    prepare: Callable[[Path, Path], None] = lambda folder, shared: None
    replaces: str = ""  # a file that is there before: old or new, whatever happens


def train(*changes: str, ranks: int = 1) -> Callable[[Path], Command]:
    sets = [word for change in (*TRAINING, *changes) for word in ("--set", change)]
    return lambda folder: Command(("train", "base/micro", *sets, "--run", str(folder / "run")), ranks)


def measure(workers: int = 1, ranks: int = 1) -> Callable[[Path], Command]:
    how = ("--data", "colours", "--limit", "12", "--batch-size", "4", "--keep", "3", "--workers", str(workers))

    def command(folder: Path) -> Command:
        suite = str(folder / "suite.yaml")
        return Command(("measure", str(folder / "model"), "--suite", suite, *how, "--dir", str(folder / "run")), ranks)

    return command


def copied(*names: str) -> Callable[[Path, Path], None]:
    """Begin with some of what was made once for all."""

    def prepare(folder: Path, shared: Path) -> None:
        for name in names:
            source = shared / name
            shutil.copytree(source, folder / name) if source.is_dir() else shutil.copy(source, folder / name)

    return prepare


def report(folder: Path) -> Command:
    return Command(("report", str(folder / "one"), str(folder / "two"), "-o", str(folder / "page.html")))


def leaderboard(folder: Path) -> Command:
    outputs = ("-o", str(folder / "page.html"), "--csv", str(folder / "numbers.csv"))
    return Command(("leaderboard", str(folder), *outputs, "--robustbench", str(folder / "robustbench")))


def files(folder: Path, *patterns: str) -> dict[str, str]:
    """SHA-256 of the files' bytes."""
    found = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
    return {path.relative_to(folder).as_posix(): storage.sha256(path.read_bytes()) for path in found}


def of_training(folder: Path) -> dict[str, str]:
    home = Run(folder / "run")
    counted = files(home.folder, "model/*.safetensors", "epochs/*/*.safetensors", "checkpoints/*.safetensors")
    for path in sorted([*home.folder.glob("model/card.json"), *home.folder.glob("epochs/*/card.json")]):
        card = storage.read_json(path)
        counted[f"{path.parent.name}/card"] = storage.fingerprint({**card, "about": _without(card["about"], "run_id")})
    records = [_without(record, *VOLATILE) for record in home.history() if record["kind"] != "event"]
    counted |= {f"log {n}": json.dumps(record, sort_keys=True) for n, record in enumerate(records)}
    return counted | {"recipe": json.dumps(home.recipe(), sort_keys=True)} | leftovers(folder)


def of_measuring(folder: Path) -> dict[str, str]:
    home = folder / "run"
    counted = files(home, "facts/**/*.safetensors", "facts/**/*.json")
    for path in sorted((home / "measurements").glob("*.json")):
        told = _without(storage.read_json(path), "created", "command", "machine", "seconds")
        counted[path.name] = json.dumps(told, sort_keys=True)
    return counted | leftovers(folder)


def of_pages(folder: Path) -> dict[str, str]:
    return files(folder, "page.html", "numbers.csv", "robustbench/**/*") | leftovers(folder)


def of_saving(folder: Path) -> dict[str, str]:
    return files(folder / "model", "*.*") | leftovers(folder)


def leftovers(folder: Path) -> dict[str, str]:
    """Temporary files that a killed process left, and the next one did not remove."""
    return {f"left over {path.name}": "" for path in folder.rglob(".*.tmp")}


def _without(content: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in names}


def make_shared(shared: Path) -> None:
    """A model and two measured runs, made once."""
    shared.mkdir(parents=True)
    (shared / "suite.yaml").write_text(SUITE)
    (shared / "page.html").write_text("an older page")
    _done(save_model(shared / "model", 0), shared)
    for name, seed in (("one", 0), ("two", 1)):
        sets = [word for change in (*TRAINING, *ADVERSARIAL, f"seed={seed}") for word in ("--set", change)]
        _done(Command(("train", "base/micro", *sets, "--run", str(shared / name))), shared)
        words = ("--suite", str(shared / "suite.yaml"), "--data", "colours", "--limit", "12", "--workers", "1")
        _done(Command(("measure", str(shared / name), *words)), shared)


def _done(command: Command, folder: Path) -> None:
    ended = run(command, folder)
    assert ended.code == 0, ended.output


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("train", train(*ADVERSARIAL), of_training),
        Scenario("train, networks beside", train(*BESIDE), of_training),
        Scenario("train, 2 ranks", train(*ADVERSARIAL, ranks=2), of_training),
        Scenario("measure", measure(), of_measuring, copied("suite.yaml", "model")),
        Scenario("measure, 2 workers", measure(workers=2), of_measuring, copied("suite.yaml", "model")),
        Scenario("measure, 2 ranks", measure(ranks=2), of_measuring, copied("suite.yaml", "model")),
        Scenario("save", lambda folder: save_model(folder / "model", 1), of_saving, copied("model"), "model/card.json"),
        Scenario("report", report, of_pages, copied("one", "two", "page.html"), "page.html"),
        Scenario("leaderboard", leaderboard, of_pages, copied("one", "two", "page.html"), "page.html"),
    )
}

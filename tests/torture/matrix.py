"""Every kind of file of a run × every damage: detected in one line, or without effect on any number.

    python -m tests.torture.matrix --flips 100 --seed 0

What a run is read for is done by five readers: `read` takes all that a report is made of, `networks` loads what the
objective trained, `load` the model, `measure` asks for what is stored, `resume` goes on with the training. A reader
that does not open a file on the undamaged run cannot depend on what is in it, so each is asked only about files that it
opens.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bastion import storage
from bastion.errors import BastionError
from bastion.measuring.facts import Facts, read_measurements
from bastion.measuring.runner import measure
from bastion.models import checkpoint
from bastion.models.load import load
from bastion.reporting.tables import read_runs
from bastion.run import Run
from bastion.training.trainer import train
from tests.torture.plugins.data import colours  # noqa: F401  (registers the data set)
from tests.torture.record import Record
from tests.torture.scenarios import ADVERSARIAL, BESIDE, SUITE, TRAINING, of_training

# One file of each kind, by a pattern in the run's folder; of several the last.
ORDINARY = {
    "recipe": "recipe.yaml",
    "provenance": "provenance.json",
    "log": "log.jsonl",
    "checkpoint": "checkpoints/*.safetensors",
    "card": "model/card.json",
    "weights": "model/*.safetensors",
    "identity": "facts/*/identity.json",
    "facts of a probe": "facts/*/{clean}/*.safetensors",
    "facts with pictures": "facts/*/{pgd}/*.safetensors",
    "facts of a study": "facts/*/{norms}/*.safetensors",
    "measurement": "measurements/*.json",
    "TensorBoard": "tensorboard/*",
    "lock": ".lock",
}
EPOCH = "epochs/00001"  # the other one is written anew from the older checkpoint
# In a run with networks beside the model, started by torchrun, whose newest checkpoint is damaged already.
BESIDE_THE_MODEL = {
    "older checkpoint": "checkpoints/{older}",
    "card of an epoch": f"{EPOCH}/card.json",
    "weights of an epoch": f"{EPOCH}/{{weights}}.safetensors",
    "networks of the objective": "model/{networks}.safetensors",
    "torchrun's id": ".launched",
}
RUNS = {
    (*ADVERSARIAL, "validate.choose=last"): ORDINARY,
    (*BESIDE, "checkpoint.keep=2"): BESIDE_THE_MODEL,
}
CARDS = ("card", "card of an epoch")  # their folders hold a model
FILES = ORDINARY | BESIDE_THE_MODEL
TORCHRUN = {"TORCHELASTIC_RUN_ID": "matrix", "WORLD_SIZE": "1"}
Numbers = dict[str, Any]
_opened: set[str] | None = None  # paths, while a reader is watched


def make_run(folder: Path, changes: tuple[str, ...], seed: int) -> None:
    with patch.dict(os.environ, TORCHRUN):
        train("base/micro", changes=(*TRAINING, *changes, f"seed={seed}"), folder=folder)
    _measured(folder)
    if "{older}" in "".join(RUNS[changes].values()):
        sorted(folder.glob("checkpoints/*"))[-1].write_bytes(b"")


def _measured(folder: Path) -> Facts:
    suite = folder.parent / "suite.yaml"
    suite.write_text(SUITE)
    return measure(folder, "colours", suite, limit=12, batch_size=4, keep=3)


def read(folder: Path) -> Numbers:
    """All that a report says of a run."""
    (reported,) = read_runs([folder])
    files = reported.files
    said = {"recipe": files.recipe(), "card": files.card(), "log": files.history(), "provenance": files.provenance()}
    return said | {each.about.suite: _of_facts(each) for each in read_measurements(files)}


def measure_again(folder: Path) -> Numbers:
    return _of_facts(_measured(folder))


def resume(folder: Path) -> Numbers:
    """As torchrun does it, which restarts processes by the command that began."""
    recipe = Run(folder).recipe() or {}
    (changes,) = (each for each in RUNS if ("rspc" in each[0]) == (recipe.get("objective", {}).get("name") == "rspc"))
    with patch.dict(os.environ, TORCHRUN):
        train("base/micro", changes=(*TRAINING, *changes, f"seed={recipe.get('seed', 0)}"), folder=folder)
    return dict(of_training(folder.parent))


def networks(folder: Path) -> Numbers:
    return {"networks": checkpoint.digest_tensors(checkpoint.load_networks(folder / "model"))}


def load_model(folder: Path) -> Numbers:
    return {"weights": checkpoint.digest(load(folder))}


def _of_facts(facts: Facts) -> Numbers:
    about = facts.about
    pictures = {case.label: facts.pictures(case.label) for case in about.cases if case.kind == "probes"}
    return {
        "numbers": facts.numbers(),
        "estimates": repr(facts.estimates()),
        "scalars": facts.scalars(),
        "warnings": [str(warning) for warning in facts.warnings()],
        "columns": {name: storage.digest({name: column}) for name, column in facts.columns.items()},
        "pictures": {label: storage.digest(kept) for label, kept in pictures.items()},
        "about": [about.n, about.population, about.data, about.weights, about.summary, about.doubts],
    }


READERS: dict[str, Callable[[Path], Numbers]] = {
    "read": read,
    "networks": networks,
    "load": load_model,
    "measure": measure_again,
    "resume": resume,
}


@dataclass(frozen=True)
class Verdict:
    kind: str
    damage: str
    reader: str
    outcome: str  # detected, harmless, WRONG or TRACEBACK
    why: str = ""


class Matrix:
    """Two runs that differ in their seed, and what each reader says of the first."""

    def __init__(self, folder: Path, changes: tuple[str, ...]) -> None:
        self.folder = folder
        for name, seed in (("first", 0), ("second", 1)):
            make_run(folder / name / "run", changes, seed)
        self.files = {kind: self._file("first", pattern) for kind, pattern in RUNS[changes].items()}
        self.reads: dict[str, set[str]] = {}
        self.truth: dict[str, Numbers] = {}
        for name, reader in READERS.items():
            home = self._copy()
            with _watching() as opened:
                self.truth[name] = reader(home)
            self.reads[name] = {kind for kind, path in self.files.items() if any(o.endswith(path) for o in opened)}

    def _file(self, run: str, pattern: str) -> str:
        """Its path in the run's folder."""
        home = self.folder / run / "run"
        (facts,) = read_measurements(Run(home))
        named = {case.label: case.store.rpartition("/")[2] for case in facts.about.cases}
        named["older"] = min(path.name for path in home.glob("checkpoints/*"))
        if (home / EPOCH).exists():
            named["weights"] = checkpoint.read_card(home / EPOCH).weights[:16]
            named["networks"] = str(checkpoint.read_card(home / "model").networks)[:16]
        return str(sorted(home.glob(pattern.format(**named)))[-1].relative_to(home))

    def _copy(self) -> Path:
        """The first run once more. Always in the same place, because cards tell the name of the folder."""
        work = self.folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(self.folder / "first", work)
        return work / "run"

    def damages(self, kind: str, flips: int, chance: random.Random) -> Iterator[tuple[str, bytes | Path]]:
        """What a file is replaced by; a folder takes the place of the one that the file lies in."""
        content = (self.folder / "first" / "run" / self.files[kind]).read_bytes()
        other = self.folder / "second" / "run" / self._file("second", FILES[kind])
        yield "empty", b""
        yield "half", content[: len(content) // 2]
        yield "zeros", bytes(len(content))
        yield "of another run", other.read_bytes()
        if kind in CARDS:
            yield "folder of another run", other.parent
        for bit in (chance.randrange(8 * len(content)) for _ in range(flips if content else 0)):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            yield "one bit", bytes(flipped)

    def verdicts(self, flips: int, seed: int, *, first_reader: bool = False) -> Iterator[Verdict]:
        """`first_reader`: of those that open a file, only the first, which is the fastest."""
        for _, judge in self.cases(flips, seed, first_reader=first_reader):
            yield judge()

    def cases(
        self, flips: int, seed: int, *, first_reader: bool = False
    ) -> Iterator[tuple[str, Callable[[], Verdict]]]:
        """A name for each damage and reader, and a function that gives the verdict."""
        for kind in self.files:
            chance = random.Random(f"{seed} {kind}")
            readers = [name for name in READERS if kind in self.reads[name]][: 1 if first_reader else None]
            for number, (damage, content) in enumerate(self.damages(kind, flips, chance)):
                if not readers:
                    yield f"{kind} | {number}", partial(Verdict, kind, damage, "", "not read")
                for name in readers:
                    yield f"{kind} | {number} | {name}", partial(self._verdict, kind, damage, content, name)

    def _verdict(self, kind: str, damage: str, content: bytes | Path, reader: str) -> Verdict:
        home = self._copy()
        path = home / self.files[kind]
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            shutil.rmtree(path.parent)
            shutil.copytree(content, path.parent)
        try:
            found = READERS[reader](home)
        except BastionError as error:
            clear = "\n" not in str(error) and str(home) in str(error)
            return Verdict(kind, damage, reader, "detected" if clear else "TRACEBACK", str(error))
        except Exception as error:
            return Verdict(kind, damage, reader, "TRACEBACK", f"{type(error).__name__}: {error}")
        differing = [name for name, value in self.truth[reader].items() if found.get(name) != value]
        return Verdict(kind, damage, reader, "WRONG" if differing else "harmless", ", ".join(differing))


@contextmanager
def _watching() -> Iterator[set[str]]:
    """The paths that are opened inside."""
    global _opened
    _opened = set()
    try:
        yield _opened
    finally:
        _opened = None


def _note_open(event: str, given: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(given[0], str | Path):
        _opened.add(str(given[0]))


def table(verdicts: list[Verdict]) -> str:
    """Markdown: by kind of file and damage, how many readers said what."""
    counts = Counter((verdict.kind, verdict.damage, verdict.outcome) for verdict in verdicts)
    damages = list(dict.fromkeys(verdict.damage for verdict in verdicts))
    lines = [f"| | {' | '.join(damages)} |", f"| --- |{' --- |' * len(damages)}"]
    for kind in FILES:
        cells = []
        for damage in damages:
            found = {outcome: n for (k, d, outcome), n in counts.items() if (k, d) == (kind, damage)}
            cells.append(", ".join(f"{n} {outcome}" for outcome, n in found.items()))
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    return "\n".join([*lines, "", ", ".join(f"{n} {outcome}" for outcome, n in outcomes.items())])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=100, help="single bits turned in each kind of file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10**6)
    parser.add_argument("--results", type=Path, help="default: torture/matrix-SEED.jsonl; what is in it is not redone")
    given = parser.parse_args()
    record = Record(given.results or Path("torture") / f"matrix-{given.seed}.jsonl")
    folder, began = Path(tempfile.mkdtemp(prefix="matrix-")).resolve(), time.monotonic()
    try:
        for number, changes in enumerate(RUNS):
            matrix = Matrix(folder / str(number), changes)
            for name, judge in matrix.cases(given.flips, given.seed):
                if name in record.results or time.monotonic() - began > 60 * given.minutes:
                    continue
                verdict = judge()
                record.add(name, asdict(verdict))
                if verdict.outcome.isupper():
                    print(verdict, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    verdicts = [Verdict(**each) for each in record.results.values()]
    print(table(verdicts))
    return int(any(verdict.outcome.isupper() for verdict in verdicts))


sys.addaudithook(_note_open)
warnings.filterwarnings("error", category=UserWarning, module="bastion")

if __name__ == "__main__":
    sys.exit(main())

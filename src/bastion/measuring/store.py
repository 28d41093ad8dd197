"""Facts on disk, per example, and what is read off them. No torch.

Each probe has its own folder, named by all that its facts depend on (model, data, probe, seed, block and batch size).
Suites that share a probe share its facts, and a longer measurement goes on from a shorter one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bastion import storage
from bastion.errors import BastionError
from bastion.measuring import sanity
from bastion.measuring.intervals import Estimate, estimate
from bastion.recipe import WORST_CASE
from bastion.run import Run

Column = np.ndarray[Any, Any]
CORRECT = "correct"  # the fact that accuracies are made of


@dataclass(frozen=True)
class ProbeStore:
    """The facts of one probe on one model and data set."""

    folder: Path

    @classmethod
    def open(cls, run: Run, identity: Mapping[str, Any]) -> ProbeStore:
        """`identity` is everything the facts depend on; it names the folder and is written beside them."""
        store = cls(run.facts / storage.fingerprint(identity, digits=16))
        if not (store.folder / "probe.json").is_file():
            storage.write_json(store.folder / "probe.json", dict(identity))
        return store

    def _path(self, block: range, kind: str) -> Path:
        return self.folder / f"{kind}-{block.start:07d}-{block.stop:07d}.safetensors"

    def _place(self, path: Path) -> str:
        """Where facts belong: a file that was put elsewhere by hand tells of other examples, or of another model."""
        return f"{self.folder.name}/{path.name}"

    def has(self, block: range) -> bool:
        return self._path(block, "facts").is_file()

    def write(self, block: range, facts: Mapping[str, Column], pictures: Mapping[str, Column]) -> None:
        """Pictures first: where facts are, all of the block is."""
        if pictures:
            storage.write_arrays(self._path(block, "pictures"), pictures)
        path = self._path(block, "facts")
        storage.write_arrays(path, facts, {"of": self._place(path)})

    def read(self, blocks: list[range]) -> dict[str, Column]:
        return joined([self._facts(block) for block in blocks])

    def _facts(self, block: range) -> dict[str, Column]:
        path = self._path(block, "facts")
        facts, metadata = storage.read_arrays(path)
        if metadata.get("of", self._place(path)) != self._place(path):
            raise BastionError(f"{path}: facts of something else than its place says; remove it and measure again")
        return facts

    def pictures(self, blocks: list[range]) -> dict[str, Column]:
        """Of the first examples, as many as were kept."""
        kept = [block for block in blocks if self._path(block, "pictures").is_file()]
        return joined([storage.read_arrays(self._path(block, "pictures"))[0] for block in kept])


def joined(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Columns one below the other. A warning that a part does not mention is not given there."""

    def column(part: Mapping[str, Column], name: str) -> Column:
        silent = name not in part and name.startswith(sanity.PREFIX)
        return np.zeros(len(part["index"]), bool) if silent else part[name]

    names = dict.fromkeys(name for part in parts for name in part)
    return {name: np.concatenate([column(part, name) for part in parts]) for name in names}


def blocks(n: int, size: int) -> list[range]:
    """0 … n-1 cut into fixed blocks; only the last may be shorter."""
    return [range(start, min(start + size, n)) for start in range(0, n, size)]


@dataclass(frozen=True)
class Facts:
    """A measured suite, read back: one column per probe and fact, one row per example."""

    about: dict[str, Any]  # model, data, suite, seed, n, when and where
    columns: dict[str, Column]  # "pgd-20/correct" -> (n,)

    @property
    def labels(self) -> list[str]:
        return list(self.about["probes"])

    @property
    def n(self) -> int:
        return int(self.about["n"])

    @property
    def blocks(self) -> list[range]:
        return blocks(self.n, int(self.about["block"]))

    def correct(self, label: str) -> Column:
        """(n,) bool: right under this probe."""
        return self.columns[f"{label}/{CORRECT}"]

    def accuracies(self) -> dict[str, Estimate]:
        """Per probe, and the worst case over all of them example by example."""
        labels = [label for label in self.labels if f"{label}/{CORRECT}" in self.columns]
        result = {label: estimate(self.correct(label)) for label in labels}
        if len(labels) > 1:
            result[WORST_CASE] = estimate(np.logical_and.reduce([self.correct(label) for label in labels]))
        return result

    def estimates(self) -> dict[str, Estimate]:
        """Every column of yes and no or of real numbers, accuracies and sanity checks aside."""
        columns = {
            name: column
            for name, column in self.columns.items()
            if column.dtype.kind in "bf" and not name.endswith(f"/{CORRECT}") and not sanity.is_check(name)
        }
        return {name: estimate(column) for name, column in columns.items()}

    def stages(self, label: str) -> dict[str, Estimate]:
        """Of a probe whose attack is an ensemble: accuracy after each of its members."""
        members: list[str] = self.about.get("members", {}).get(label, [])
        if not members or not {f"{label}/fooled_by", f"{label}/{CORRECT}"} <= self.columns.keys():
            return {}
        by = self.columns[f"{label}/fooled_by"]
        right = self.correct(label) | (by >= 0)  # before the first of them
        return {
            f"{number + 1}. {name}": estimate(right & ~((by >= 0) & (by <= number)))
            for number, name in enumerate(members)
        }

    @property
    def checks(self) -> int:
        """How many sanity checks were made."""
        return sum(map(sanity.is_check, self.columns))

    def warnings(self) -> list[sanity.SanityWarning]:
        """Why the accuracies should not be trusted, as far as the sanity checks can tell."""
        return sanity.warnings(self.columns)

    def table(self) -> str:
        """Accuracy with its 95 % interval, per probe and worst case, and the warnings, as text."""
        lines: list[tuple[str, Estimate]] = []
        for label, accuracy in self.accuracies().items():
            lines.append((label, accuracy))
            lines += [(f"  {stage}", after) for stage, after in self.stages(label).items()]
        width = max([16, *(len(label) for label, _ in lines), *map(len, self._distortions())])
        rows = [
            f"{label:<{width}} {100 * e.value:6.2f} %   [{100 * e.low:5.2f}, {100 * e.high:5.2f}]   n = {e.n}"
            for label, e in lines
        ]
        rows += [f"{label:<{width}} {text}" for label, text in self._distortions().items()]
        about = self.about
        head = f"{about['model']} on {about['data']['name']} ({about['split']}), suite {about['suite']}"
        return "\n".join([head, *rows, *self._doubts()])

    def _distortions(self) -> dict[str, str]:
        """Of probes that tell no accuracy, only how far the nearest fooling point of each example is."""
        told = {}
        for label in self.labels:
            if f"{label}/distance" in self.columns and f"{label}/{CORRECT}" not in self.columns:
                distance = self.columns[f"{label}/distance"]
                rest = int(np.isinf(distance).sum())
                told[label] = f"median distance {np.median(distance):.4g}, {rest} not fooled   n = {len(distance)}"
        return told

    def _doubts(self) -> list[str]:
        if self.checks and not self.warnings():
            return [f"sanity checks: {self.checks}, no warning"]
        return [str(warning) for warning in self.warnings()]


def write_measurement(run: Run, about: Mapping[str, Any], *, anew: bool = True) -> Path:
    """`about["probes"]` maps each label to its store's folder name. If nothing was made anew, a stored one stays."""
    key = storage.fingerprint({"probes": about["probes"], "n": about["n"]}, digits=8)
    path = run.measurements / f"{about['suite']}-{key}.json"
    if anew or not _says(path, about):
        storage.write_json(path, dict(about))
    return path


def _says(path: Path, about: Mapping[str, Any]) -> bool:
    """Does a measurement tell this, but for when, where and by which command it was made?"""
    try:
        stored = storage.read_json(path)
    except BastionError:  # not there, or damaged
        return False
    passing = dict.fromkeys(("created", "command", "machine"))
    return isinstance(stored, dict) and storage.fingerprint(stored | passing) == storage.fingerprint(
        {**about, **passing}
    )


def read_measurement(run: Run, path: Path) -> Facts:
    about = storage.read_json(path)
    if not _is_measurement(about):
        raise BastionError(f"{path}: not a measurement; remove it and measure again")
    columns: dict[str, Column] = {}
    for label, folder in about["probes"].items():
        part = ProbeStore(run.facts / folder).read(blocks(about["n"], about["block"]))
        columns |= {f"{label}/{name}": column for name, column in part.items()}
    return Facts(about, columns)


def _is_measurement(about: Any) -> bool:
    if not isinstance(about, dict) or not {"probes", "n", "block", "created"} <= about.keys():
        return False
    counts, folders = (about["n"], about["block"]), about["probes"]
    return (
        all(type(count) is int and count > 0 for count in counts)
        and isinstance(folders, dict)
        and all(isinstance(folder, str) for folder in folders.values())
    )


def read_measurements(run: Run) -> list[Facts]:
    """All finished measurements of a run, oldest first."""
    facts = [read_measurement(run, path) for path in sorted(run.measurements.glob("*.json"))]
    return sorted(facts, key=lambda each: str(each.about["created"]))


def read_pictures(run: Run, facts: Facts, label: str) -> dict[str, Column]:
    if label not in facts.about["probes"]:
        raise BastionError(f"{run.folder}: no probe '{label}' in this measurement; it has {', '.join(facts.labels)}")
    return ProbeStore(run.facts / facts.about["probes"][label]).pictures(facts.blocks)

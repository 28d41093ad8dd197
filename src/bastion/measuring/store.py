"""Facts on disk, example by example. No torch.

    facts/IDENTITY/identity.json        a model and the data it was measured on
    facts/IDENTITY/CASE/*.safetensors   facts of one probe or study; each file has some of the examples

A case is named by the probe's settings, versions and seed, and the variant of the data. Workers write small files,
which are merged into larger ones later. Any number of processes may write and merge at once: files are whole or
absent, an example that is in two files has the same facts in both, and a file is removed only after its content is in
another one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from bastion import storage
from bastion.errors import BastionError

Column = np.ndarray[Any, Any]
P = ParamSpec("P")
R = TypeVar("R")
POSITION = "position"  # of the example in the split; of the part, in a study
ORIGIN = "provenance"  # the number of each row's entry in the file's list of origins
PICTURE = "picture."
WARNING = "warning."
MERGED = 2048  # examples in a merged file: one damaged file costs no more than these


class _Vanished(Exception):
    """Another process merged a file away while it was about to be read: list the files again."""


def _listing_again(method: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(method)
    def stable(*args: P.args, **kwargs: P.kwargs) -> R:
        while True:
            with suppress(_Vanished):
                return method(*args, **kwargs)

    return stable


@dataclass(frozen=True)
class FactStore:
    """The facts of one case."""

    folder: Path

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    @_listing_again
    def missing(self, wanted: Sequence[int]) -> list[int]:
        """Those of the positions that are not stored."""
        stored = {position for path in self._files() for position in self._read(path, [])[0][POSITION].tolist()}
        return [position for position in wanted if position not in stored]

    def write(
        self,
        positions: Sequence[int],
        facts: Mapping[str, Column],
        pictures: Mapping[str, Column],
        origin: Mapping[str, Any],
    ) -> None:
        """`facts`: one row for each position. `pictures`: rows of the first of them."""
        rows = {POSITION: np.array(positions), ORIGIN: np.zeros(len(positions), np.int64), **facts}
        shown = {f"{PICTURE}{name}": rows for name, rows in pictures.items()}
        if shown:
            shown[PICTURE + POSITION] = np.array(positions[: len(next(iter(shown.values())))])
        self._write(rows | shown, [dict(origin)])

    @_listing_again
    def read(self, names: Collection[str], n: int) -> dict[str, Column]:
        """The columns of the first n positions, in order."""
        return self._table(names, n)[0]

    @_listing_again
    def columns(self) -> list[str]:
        """Names of the facts, without pictures."""
        names = {name for path in self._files() for name in self._names(path)}
        return sorted(name for name in names if name not in (POSITION, ORIGIN) and not name.startswith(PICTURE))

    @_listing_again
    def pictures(self, n: int) -> dict[str, Column]:
        """`position` and what was kept of the first positions below n."""
        parts = [self._read(path, None)[0] for path in self._files()]
        kept = [
            {name.removeprefix(PICTURE): column for name, column in part.items() if name.startswith(PICTURE)}
            for part in parts
            if PICTURE + POSITION in part
        ]
        return _rows(_joined(kept), n) if kept else {}

    @_listing_again
    def origins(self, n: int) -> list[dict[str, Any]]:
        """Versions, device, machine and batch size behind the first n positions: several, if they were mixed."""
        table, origins = self._table([ORIGIN], n)
        return [origins[number] for number in np.unique(table[ORIGIN])]

    @_listing_again
    def merge(self) -> None:
        """Make few files of many."""
        groups: dict[int, list[Path]] = {}
        for path in self._files():
            groups.setdefault(int(path.name.partition("-")[0]) // MERGED, []).append(path)
        for paths in groups.values():
            if len(paths) > 1:
                written = self._write(*self._union(paths, None))
                for path in set(paths) - {written}:
                    path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))

    def _write(self, columns: Mapping[str, Column], origins: list[dict[str, Any]]) -> Path:
        positions = columns[POSITION]
        path = self.folder / f"{positions[0]:07d}-{positions[-1]:07d}-{storage.sha256(positions)[:8]}.safetensors"
        storage.write_arrays(path, columns, {"of": self.name, "origins": json.dumps(origins, sort_keys=True)})
        return path

    def _read(self, path: Path, names: Collection[str] | None) -> tuple[dict[str, Column], list[dict[str, Any]]]:
        try:
            columns, metadata = storage.read_arrays(path, None if names is None else {POSITION, *names})
        except (BastionError, FileNotFoundError):
            if path.exists():
                raise
            raise _Vanished from None
        if metadata.get("of") != self.name:
            raise BastionError(f"{path}: holds facts of another measurement; remove it and measure again")
        return columns, json.loads(metadata["origins"])

    def _names(self, path: Path) -> list[str]:
        try:
            return storage.array_names(path)
        except (BastionError, FileNotFoundError):
            if path.exists():
                raise
            raise _Vanished from None

    def _union(
        self, paths: Iterable[Path], names: Collection[str] | None
    ) -> tuple[dict[str, Column], list[dict[str, Any]]]:
        """All rows of these files, ordered by position, each once."""
        parts, origins = [], []
        for path in paths:
            columns, own = self._read(path, names)
            origins += [origin for origin in own if origin not in origins]
            if ORIGIN in columns:
                numbers = np.array([origins.index(origin) for origin in own])
                columns = columns | {ORIGIN: numbers[columns[ORIGIN]]}
            parts.append(columns)
        pictured = [
            {name: column for name, column in part.items() if name.startswith(PICTURE)}
            for part in parts
            if PICTURE + POSITION in part
        ]
        rows = [{name: column for name, column in part.items() if not name.startswith(PICTURE)} for part in parts]
        return _rows(_joined(rows)) | (_rows(_joined(pictured), key=PICTURE + POSITION) if pictured else {}), origins

    def _table(self, names: Collection[str], n: int) -> tuple[dict[str, Column], list[dict[str, Any]]]:
        columns, origins = self._union(self._files(), names) if self._files() else ({POSITION: np.zeros(0)}, [])
        columns = _rows(columns, n)
        if not np.array_equal(columns[POSITION], np.arange(n)):
            raise BastionError(f"{self.folder}: {n - len(columns[POSITION])} of {n} facts are missing; measure again")
        lacking = [name for name in names if name not in columns and not name.startswith(WARNING)]
        if lacking:
            raise BastionError(f"{self.folder}: has no facts '{lacking[0]}'; remove it and measure again")
        return {name: columns.get(name, np.zeros(n, bool)) for name in names}, origins


def _rows(columns: dict[str, Column], n: int | None = None, key: str = POSITION) -> dict[str, Column]:
    """Ordered by position, each position once, and only those below n."""
    positions, rows = np.unique(columns[key], return_index=True)
    rows = rows if n is None else rows[positions < n]
    return {name: column[rows] for name, column in columns.items()}


def _joined(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Columns one below the other. A warning that a part does not mention is not given there."""

    def column(part: Mapping[str, Column], name: str) -> Column:
        silent = name not in part and name.startswith(WARNING)
        return np.zeros(len(part[POSITION]), bool) if silent else part[name]

    names = dict.fromkeys(name for part in parts for name in part)
    return {name: np.concatenate([column(part, name) for part in parts]) for name in names}
